"""Who scores responses, and who answers them in a dialogue."""

from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.schema.bounds import above, at_least, share


@dataclass
class RewardRouteConfig:
    """The reward of one prompt type."""

    name: str = ""
    """An entry of the reward registry, or package.module:function."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the reward, checked against its signature."""
    timeout_s: float = at_least(0, default=0.0)
    """As reward.timeout_s, for this type; 0 means reward.timeout_s."""
    rescale_to: list[float] = field(default_factory=list)
    """[low, high]: the reward's range is mapped onto this one linearly."""


@dataclass
class ProcessRewardConfig:
    """Dense rewards at line ends from a process reward model; needs schedule.mode=sync."""

    path: str = ""
    """The model's folder; empty: none."""
    weight_if_failed: float = at_least(0, default=0.25)
    """Largest sum of the line rewards of a response that fails its tests."""
    weight_if_passed: float = at_least(0, default=0.025)
    """Largest sum of the line rewards of a response that passes its tests."""
    comment_prefixes: list[str] = field(default_factory=lambda: ["#"])
    """A line that starts with one of these is a comment: it gets no reward."""


@dataclass
class RewardConfig:
    """Who scores the responses, with which deadlines."""

    name: str = "math"
    """An entry of the reward registry, or package.module:function."""
    by_type: dict[str, RewardRouteConfig] = field(default_factory=dict)
    """Rewards chosen by prompt type; then ``name`` is not used and every type needs an entry."""
    require_think: bool = False
    """A response that is not <think>...</think>solution scores 0; only the solution is graded."""
    process: ProcessRewardConfig = field(default_factory=ProcessRewardConfig)
    num_workers: int = at_least(1, default=2)
    """Worker processes of a reward that computes on the CPU."""
    timeout_s: float = above(0, default=5.0)
    """A response that takes longer to score is killed, masked and counted."""
    max_error_rate: float = share(default=0.1)
    """More unscored responses than this share of a step stop the run."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the reward, checked against its signature."""
    max_concurrency: int = at_least(1, default=256)
    """Requests in progress of a reward that asks a server."""
    max_retries: int = at_least(0, default=1)
    """Times an item is tried again after its worker died or its server failed."""
    memory_limit_mb: int = at_least(1, default=2048)
    """What one worker may allocate."""
    start_timeout_s: float = above(0, default=60.0)
    """Importing the reward may take this long."""


@dataclass
class EnvironmentConfig:
    """Dialogues: who answers the model's turns."""

    name: str = ""
    """A registered environment (pag, calculator) or package.module:Class; empty: one response, no dialogue."""
    max_turn_tokens: int = at_least(0, default=0)
    """Generated tokens of one turn; 0 means the rest of the budget."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment, checked against its signature."""
