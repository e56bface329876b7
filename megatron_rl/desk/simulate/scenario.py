"""Reduces a configuration to the scenario that a simulation needs."""

from dataclasses import dataclass, field
from math import ceil
from typing import Any

from megatron_rl.config.derived import effective_window_tokens, eval_sets, needs_greedy, num_responses_per_step
from megatron_rl.config.schedule_facts import (
    Facts,
    facts_of,
    placement_problem,
    reuses_first_logprobs,
    window_jitter_tokens,
)
from megatron_rl.config.schema import Config, OldPolicy
from megatron_rl.config.schema.bounds import bound_problems, type_problems
from megatron_rl.desk.simulate.decoding import ServerLimits
from megatron_rl.errors import ConfigError
from megatron_rl.schedule.graph import Stage
from megatron_rl.schedule.table import make_graph


@dataclass(frozen=True)
class Scenario:
    """The facts of a configuration that determine its simulated steps."""

    facts: Facts
    num_trained: int
    """Number of responses that a step trains on."""
    num_slots: int
    """Number of responses in progress in a step; larger with over-sampling."""
    group_size: int
    max_response_tokens: int
    window_tokens: int
    jitter_tokens: int = 0
    num_servers: int = 1
    ranks_per_server: float = 1.0
    """Number of trainer devices divided by the number of devices of one server."""
    limits: ServerLimits = field(default_factory=ServerLimits)
    recomputes_old: bool = True
    """True if a separate trainer pass computes log-probs: of the old policy, or for a loss that chooses tokens (``selects``)."""
    first_is_own_old: bool = False
    """True if a step's first update needs no such pass (``config.schedule_facts.reuses_first_logprobs``)."""
    policy_minibatch_size: int = 512
    critic_minibatch_size: int = 512
    critic_epochs: int = 1
    critic_warmup_steps: int = 0
    """Number of steps in which the policy is frozen."""
    step_wait_s: float = 5.0
    """Seconds that a window waits for the environment after the last token (``environment.step_wait_s``)."""
    save_every_steps: int = 0
    eval_every_steps: int = 0

    def stale_fraction(self, num_rows: int, step: int) -> float:
        """Return the share of a step's rows that need a pass for their old log-probs."""
        if not self.recomputes_old:
            return 0.0
        if not self.first_is_own_old or step < self.critic_warmup_steps or not num_rows:
            return 1.0
        # Mini-batches differ by one row at most, and the first one has the smaller size.
        num_updates = ceil(num_rows / self.policy_minibatch_size)
        return 1.0 - num_rows // num_updates / num_rows

    @property
    def over_samples(self) -> bool:
        return self.num_slots > self.num_trained

    @property
    def graph(self) -> tuple[Stage, ...]:
        return make_graph(self.facts)

    @property
    def num_settling_steps(self) -> int:
        """Steps until the work per step is stationary: the first step's longest response and the critic's warm-up have ended."""
        windows = ceil((self.max_response_tokens + self.jitter_tokens) / self.window_tokens) if self.facts.windows else 0
        return max(windows, self.critic_warmup_steps)


def make_scenario(config: Config) -> Scenario:
    """Return the configuration's scenario. Raises ConfigError for invalid settings, and for ones that cannot be simulated.

    In sync mode responses are whole, regardless of batch.window_tokens, so that a windowed recipe can be compared with sync.
    """
    batch, server = config.batch, config.rollout.server_args
    problems = [*type_problems(config)] or [*bound_problems("", config)]
    if batch.window_tokens > batch.max_response_tokens:
        problems.append(
            f"batch.window_tokens={batch.window_tokens} is longer than the longest response "
            f"(batch.max_response_tokens={batch.max_response_tokens}); lower it, or 0 for no windows"
        )
    if problem := placement_problem(config):
        problems.append(problem)
    if problems:
        raise ConfigError("\n".join(problems))
    if config.algorithm.dynamic_sampling.enabled:
        raise ConfigError(
            "algorithm.dynamic_sampling: the number of rounds of a step depends on rewards, which a simulation does not have; "
            "simulate with algorithm.dynamic_sampling.enabled=false and multiply generate by the number of rounds that you expect"
        )
    facts, num_greedy = facts_of(config), int(needs_greedy(config))
    per_prompt = batch.num_samples_per_prompt + num_greedy
    started = ceil(batch.num_prompts_per_step * config.rollout.over_sampling)
    return Scenario(
        facts=facts,
        num_trained=batch.num_prompts_per_step * per_prompt if num_greedy else num_responses_per_step(config),
        num_slots=started * per_prompt,
        group_size=per_prompt,
        max_response_tokens=batch.max_response_tokens,
        window_tokens=effective_window_tokens(config) if facts.windows else batch.max_response_tokens,
        jitter_tokens=window_jitter_tokens(config),
        num_servers=len(config.rollout.urls) or config.rollout.num_servers,
        ranks_per_server=max(config.parallel.num_ranks, 1) / config.rollout.tensor_parallel_size,
        limits=ServerLimits(
            running=int(_option(server, "max-running-requests")),
            kv_tokens=int(_option(server, "max-total-tokens")),
            inflight=config.rollout.max_inflight_requests,
            prefill_tokens=max(int(_option(server, "chunked-prefill-size", 8192)), 0),
            conservativeness=_option(server, "schedule-conservativeness", 1.0),
            # If requests may be aborted, each one is sent alone (rollout/windows.py).
            **({"http_batch": 1} if config.rollout.over_sampling > 1 else {}),
        ),
        recomputes_old=_has_own_logprobs_pass(config),
        first_is_own_old=reuses_first_logprobs(config),
        policy_minibatch_size=batch.policy_minibatch_size,
        critic_minibatch_size=batch.critic_minibatch_size,
        critic_epochs=config.critic.num_epochs,
        critic_warmup_steps=config.critic.warmup_steps if facts.critic else 0,
        step_wait_s=config.environment.step_wait_s,
        save_every_steps=config.run.save_every_steps,
        eval_every_steps=config.eval.every_steps if eval_sets(config) else 0,
    )


def _has_own_logprobs_pass(config: Config) -> bool:
    from megatron_rl.algorithms import register  # torch, which reading a scenario does not need

    selects = register.POLICY_LOSSES.find(config.algorithm.policy_loss).selects is not None
    return selects or config.algorithm.correction.old_policy is not OldPolicy.rollout


def _option(server_args: dict[str, Any], name: str, default: float = 0.0) -> float:
    """Return a server option under either spelling."""
    return float(server_args.get(name, server_args.get(name.replace("-", "_"), default)) or 0)
