"""Rewards that score responses, and environments that reply in a dialogue."""

from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.schema.bounds import above, at_least, share


@dataclass
class RewardRouteConfig:
    """The reward of one prompt type."""

    name: str = ""
    """An entry of the reward registry, package.module:function or path/file.py:function."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the reward, checked against its signature."""
    timeout_s: float = at_least(0, default=0.0)
    """Time limit for scoring one response of this type, in seconds. 0: reward.timeout_s."""
    rescale_to: list[float] = field(default_factory=list)
    """[low, high]: the reward's range is mapped linearly to this range. Empty: no rescaling."""


@dataclass
class ProcessRewardConfig:
    """Dense rewards at line ends from a process reward model; needs schedule.mode=sync."""

    path: str = ""
    """Folder of the process reward model. Empty: no process rewards."""
    weight_if_failed: float = at_least(0, default=0.25)
    """Largest sum of the line rewards of a response that fails its tests."""
    weight_if_passed: float = at_least(0, default=0.025)
    """Largest sum of the line rewards of a response that passes its tests."""


@dataclass
class RewardConfig:
    """The reward functions that score responses, with their time limits."""

    name: str = "math"
    """An entry of the reward registry, package.module:function or path/file.py:function."""
    by_type: dict[str, RewardRouteConfig] = field(default_factory=dict)
    """Rewards by prompt type; they replace ``name``, and every type needs an entry."""
    require_think: bool = False
    """Score a response 0 unless its form is <think>...</think>solution; the reward gets only the solution."""
    process: ProcessRewardConfig = field(default_factory=ProcessRewardConfig)
    num_workers: int = at_least(1, default=2)
    """Reward workers (processes) of a reward that computes on the CPU."""
    timeout_s: float = above(0, default=5.0)
    """Time limit for scoring one response, in seconds; past it, scoring is killed and the response is masked and counted."""
    max_error_rate: float = share(default=0.1)
    """Largest fraction of a step's responses that may stay unscored; a larger one stops the run (health.reward_errors)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the reward, checked against its signature."""
    max_concurrency: int = at_least(1, default=256)
    """Requests in progress of a reward that calls a server."""
    max_retries: int = at_least(0, default=1)
    """Retries per response after its reward worker exited or its server failed."""
    memory_limit_mb: int = at_least(64, default=2048)
    """Largest allocation of one reward worker, in MB."""
    start_timeout_s: float = above(0, default=60.0)
    """Time limit for importing the reward, in seconds."""


@dataclass
class EnvironmentConfig:
    """The environment that replies to the policy's turns in a dialogue."""

    name: str = ""
    """A registered environment (pag, calculator) or package.module:Class. Empty: one response, no dialogue."""
    max_turn_tokens: int = at_least(0, default=0)
    """Generated tokens per turn. 0: the rest of the budget."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment, checked against its signature."""
    call_timeout_s: float = above(0, default=600.0)
    """Time limit for one reply of an environment that waits (``async def respond``), in seconds. A dialogue whose reply is late
    ends unscored: it is masked and counted."""
    episode_timeout_s: float = above(0, default=3600.0)
    """Time limit for a whole dialogue of an environment that waits, in seconds. A resumed run starts the count again."""
    step_wait_s: float = at_least(0, default=5.0)
    """Seconds that a window waits for the environment after the last response has stopped to grow. Then the step trains without
    the dialogues that wait; they continue in a later window. Full responses (schedule.mode=sync) wait to the end."""
