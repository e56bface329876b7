"""The part of a configuration that a simulation needs."""

from dataclasses import dataclass, field
from math import ceil
from typing import Any

from megatron_rl.config.derived import (
    effective_window_tokens,
    eval_sets,
    needs_greedy,
    num_responses_per_step,
)
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
    facts: Facts
    num_trained: int
    """Responses that a step works on."""
    num_slots: int
    """Responses that are started for a step: more with over-sampling."""
    group_size: int
    max_response_tokens: int
    window_tokens: int
    jitter_tokens: int = 0
    num_servers: int = 1
    ranks_per_server: float = 1.0
    """Devices of the trainer over those of one server."""
    limits: ServerLimits = field(default_factory=ServerLimits)
    recomputes_old: bool = True
    """Log-probs of the old policy come from a trainer pass of their own."""
    first_is_own_old: bool = False
    """A step's first update needs no such pass (``config.schedule_facts.reuses_first_logprobs``)."""
    policy_minibatch_size: int = 512
    critic_minibatch_size: int = 512
    critic_epochs: int = 1
    critic_warmup_steps: int = 0
    """Steps in which the policy rests."""
    save_every_steps: int = 0
    eval_every_steps: int = 0

    def stale_fraction(self, num_rows: int, step: int) -> float:
        """The share of a step's rows that go through a pass for their old log-probs."""
        if not self.recomputes_old:
            return 0.0
        if not self.first_is_own_old or step < self.critic_warmup_steps or not num_rows:
            return 1.0
        # Mini-batches differ by one row at most, and the first is none of the larger ones.
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
        """Steps until the slots are mixed as they will be: the longest response that began in the first has ended."""
        windows = ceil((self.max_response_tokens + self.jitter_tokens) / self.window_tokens) if self.facts.windows else 0
        return max(windows, self.critic_warmup_steps)


def make_scenario(config: Config) -> Scenario:
    """Raises ConfigError for what cannot be, and for what the simulator does not know.

    In sync mode responses are whole, whatever window is set, so that a windowed run can be asked what that would take.
    """
    batch, server = config.batch, config.rollout.server_args
    problems = [*type_problems(config)] or [*bound_problems("", config)]
    if batch.window_tokens > batch.max_response_tokens:
        problems.append(
            f"batch.window_tokens={batch.window_tokens} is longer than a response may become "
            f"(batch.max_response_tokens={batch.max_response_tokens}); lower it, or 0 for no windows"
        )
    if problem := placement_problem(config):
        problems.append(problem)
    if problems:
        raise ConfigError("\n".join(problems))
    if config.algorithm.dynamic_sampling.enabled:
        raise ConfigError(
            "algorithm.dynamic_sampling: how many rounds a step needs depends on rewards, which a simulation does not have; "
            "simulate with algorithm.dynamic_sampling.enabled=false and multiply generate by the rounds you expect"
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
            running=_option(server, "max-running-requests"),
            kv_tokens=_option(server, "max-total-tokens"),
            inflight=config.rollout.max_inflight_requests,
            # Where some may be cut, each travels alone (rollout/windows.py).
            **({"http_batch": 1} if config.rollout.over_sampling > 1 else {}),
        ),
        recomputes_old=config.algorithm.correction.old_policy is not OldPolicy.rollout,
        first_is_own_old=reuses_first_logprobs(config),
        policy_minibatch_size=batch.policy_minibatch_size,
        critic_minibatch_size=batch.critic_minibatch_size,
        critic_epochs=config.critic.num_epochs,
        critic_warmup_steps=config.critic.warmup_steps if facts.critic else 0,
        save_every_steps=config.run.save_every_steps,
        eval_every_steps=config.eval.every_steps if eval_sets(config) else 0,
    )


def _option(server_args: dict[str, Any], name: str) -> int:
    """A server option under either spelling; 0 where it is not given."""
    return int(server_args.get(name, server_args.get(name.replace("-", "_"), 0)) or 0)
