"""Ranks fitting plans by the predicted seconds per finished response. Pure, and deterministic given a seed.

Each plan first gets a lower bound on its step time, from the seconds of its stages. The plans with the lowest bounds are then
simulated, with the same functions and costs as ``megatron-rl simulate --gpu``. Only with over-sampling do a step's tokens depend on
how long its stages take; the bounds ignore over-sampling.

The least GPU time of a response is that of every token decoded at a full KV cache and trained once, where no GPU ever waits:

    GPU-seconds = tokens / (tokens per second and GPU of the best server) + prefill + passes * forward pass

No schedule and no layout is faster by the rates of ``serving_time`` and ``training_time``. Not included: a pass for old
log-probs, recomputation, a pipeline's bubble, publishes.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from megatron_rl.config.derived import needs_critic, needs_reference
from megatron_rl.config.layout import expert_tensor_size, ranks_of_replica
from megatron_rl.config.schedule_facts import facts_of
from megatron_rl.config.schema import Config, ParallelConfig, Recompute
from megatron_rl.desk.costs.gpus import Gpu
from megatron_rl.desk.costs.run_memory import memory_fraction
from megatron_rl.desk.costs.serving_time import decode_curve, kv_tokens, prefill_seconds
from megatron_rl.desk.costs.training_time import REINFORCEMENT, training_seconds
from megatron_rl.desk.plan.gpu_splits import GpuSplit
from megatron_rl.desk.simulate.decoding import ServerLimits
from megatron_rl.desk.simulate.estimated_costs import estimated_kv_tokens, estimated_timing
from megatron_rl.desk.simulate.prediction import (
    PredictedMeans,
    StepWork,
    Workload,
    compute_means,
    on_clock,
    simulated_works,
    stage_seconds,
    work_of,
)
from megatron_rl.desk.simulate.scenario import Scenario, make_scenario
from megatron_rl.desk.simulate.slot_simulation import GeneratedStep, SlotProcess, serve_rows
from megatron_rl.desk.simulate.timing import Timing
from megatron_rl.families.family import ModelConfig
from megatron_rl.families.sglang_limits import split_problems
from megatron_rl.schedule.graph import Resource
from megatron_rl.schedule.table import GENERATE, UPDATE_CRITIC

_MEMORY_FRACTION = 0.86
_MOST_MACHINES = 8
_LOOKED_AT, _SIMULATED = 4, 32
"""Largest number of servers per plan in its bound and in its simulation; they represent all servers."""
_RESPONSES_THAT_COUNT, _FEWEST_STEPS, _MOST_STEPS = 40_000, 6, 200
_SAMPLED = 4000
"""Responses over which the least GPU time is averaged."""
_MORE = 4
"""Number of plans simulated in addition to the requested ones, because bounds may rank plans differently."""
_SAME = 0.005
"""Relative differences below this are within the estimates' error: the plan that uses the network less goes first."""


def response_gpu_seconds(
    config: ModelConfig, gpu: Gpu, *, responses: np.ndarray, prompts: np.ndarray, passes: float
) -> float:
    """Return GPU-seconds per response; 0 if no server of up to eight nodes holds the model.

    ``responses``, ``prompts``: [samples] tokens. ``passes``: forward passes per token, with 3 for an update.
    """
    lengths = (prompts + responses).tolist()
    # A token decoded at position i reads the prompt and i response tokens.
    contexts = responses * prompts + responses * (responses + 1) / 2
    rate = decode_rate(config, gpu, float(contexts.sum() / responses.sum()))
    if not rate:
        return 0.0
    prefill = prefill_seconds(config, gpu, num_gpus=1, lengths=prompts.tolist())
    trained = training_seconds(
        config, ParallelConfig(), gpu, lengths, num_ranks=1, passes=passes, efficiency=REINFORCEMENT
    )
    return (float(responses.sum()) / rate + prefill + trained) / len(lengths)


def decode_rate(config: ModelConfig, gpu: Gpu, context_tokens: float) -> float:
    """Return the tokens per second and GPU of the best server with a full KV cache; 0 if none holds the model."""
    rates = [0.0]
    sizes = [size for size in range(1, gpu.per_machine + 1) if gpu.per_machine % size == 0]
    for size in (*sizes, *(gpu.per_machine * 2**power for power in range(1, _MOST_MACHINES.bit_length()))):
        held = kv_tokens(config, gpu, num_gpus=size, memory_fraction=_MEMORY_FRACTION)
        if held > context_tokens and not any(split_problems(vars(config), size, "")):
            running = held / context_tokens
            rates.append(running / decode_curve(config, gpu, num_gpus=size)(running, context_tokens) / size)
    return max(rates)


@dataclass(frozen=True)
class RankedPlan:
    """A plan with its predicted means."""

    config: Config
    """Configuration with all keys that a plan chooses."""
    outcome: PredictedMeans

    @property
    def response_s(self) -> float:
        """Seconds per finished response."""
        return 1 / self.outcome.finished_per_s if self.outcome.finished_per_s else float("inf")

    @property
    def bottleneck(self) -> str:
        """The resource that limits a step."""
        outcome = self.outcome
        generation = outcome.stage_s[GENERATE] / outcome.step_s
        if facts_of(self.config).alternates:
            return f"generation, {generation:.0%} of a step" if generation > 0.5 else f"training, {1 - generation:.0%} of a step"
        if outcome.trainer_idle <= outcome.rollout_idle:
            return f"trainer (servers idle {outcome.rollout_idle:.0%})"
        return f"servers (trainer idle {outcome.trainer_idle:.0%})"


@dataclass(frozen=True)
class PlanRanking:
    """Ranks plans of a model with these ``facts`` for ``workload`` on ``gpu``."""

    config: Config
    """Configuration with all keys that a plan does not choose."""
    facts: ModelConfig
    gpu: Gpu
    workload: Workload
    windows: Sequence[int]
    """Values of batch.window_tokens to compare."""
    seed: int = 1
    served: dict[tuple[object, ...], list[tuple[float, ...]]] = field(default_factory=dict)
    """Seconds of the servers in each simulated step; other schedules generate the same tokens."""

    def best(self, found: Iterable[GpuSplit], number: int) -> list[RankedPlan]:
        """Return the ``number`` fastest plans, without plans that the estimates cannot distinguish."""
        return self.rank(self.by_bound(found), number)

    def by_bound(self, found: Iterable[GpuSplit]) -> list[Config]:
        """Return all plans, those with the lowest bounds first."""
        return in_order(self.bounds(found))

    def rank(self, configs: Sequence[Config], number: int, more: int = _MORE) -> list[RankedPlan]:
        """Return the ``number`` fastest of ``configs``, which are in the order of their bounds; ``more`` others are simulated too."""
        works: dict[tuple[int | str, ...], list[StepWork]] = {}
        chosen = [self._simulated(config, works) for config in _various(configs, number + more)]
        return sorted(chosen, key=lambda one: _order(one.response_s, one.config))[:number]

    @cached_property
    def limit_gpu_s(self) -> float:
        """The least GPU-seconds of a response (``desk.costs.response_limit``)."""
        rng, most = np.random.default_rng(self.seed), self.config.batch.max_response_tokens
        responses = np.minimum(self.workload.lengths.draw(rng, _SAMPLED), most).astype(np.float64)
        prompts = self.workload.prompts.draw(rng, _SAMPLED).astype(np.float64)
        # An update is 3 passes; the critic also computes values, a reference log-probs.
        passes = 3.0 + 4.0 * needs_critic(self.config) + needs_reference(self.config)
        return response_gpu_seconds(self.facts, self.gpu, responses=responses, prompts=prompts, passes=passes)

    def bounds(self, found: Iterable[GpuSplit]) -> Iterator[tuple[float, Config]]:
        """Yield (lower bound on the seconds per finished response, plan).

        The publish may be shorter than in the bound: its seconds are taken from the trainer's first server configuration.
        """
        for trainers, separate in found:
            # Colocated servers of one size are assumed to have the largest cache that any trainer leaves them.
            rising = sorted(trainers, key=lambda trainer: memory_fraction(trainer))
            servers = separate or tuple({trainer.rollout.tensor_parallel_size: trainer for trainer in rising}.values())
            served = {server.rollout.tensor_parallel_size: self._generate_s(server) for server in servers}
            for trainer in trainers:
                timing = estimated_timing(trainer, self.gpu, self.facts)
                for window, settled in self._settled.items():
                    trains = _trainer_seconds(self._scenario(with_window(trainer, window)), settled, timing)
                    for server in separate or (trainer,):
                        config = with_window(replace(trainer, rollout=server.rollout), window)
                        generate_s = served[server.rollout.tensor_parallel_size][window]
                        yield _step_bound(config, generate_s, trains) / max(settled.num_finished, 1), config

    def _generate_s(self, config: Config) -> dict[int, float]:
        """Return, by window, the seconds of the slowest sampled server."""
        scenario, timing = self._limited(config), estimated_timing(config, self.gpu, self.facts)
        windows = self._windows.items()
        return {window: max(self._server_s(window, steps[-1:], scenario, timing, _LOOKED_AT)[0]) for window, steps in windows}

    def _server_s(
        self, window: int, steps: Sequence[GeneratedStep], scenario: Scenario, timing: Timing, number: int
    ) -> list[tuple[float, ...]]:
        """Return the seconds of the first ``number`` servers in each of these steps, cached by all that they depend on."""
        slots = (scenario.facts.windows, scenario.facts.whole_groups, scenario.num_trained, window, len(steps))
        key = (*slots, number, scenario.num_servers, timing.decode.step_s, str(scenario.limits))
        if key not in self.served:
            self.served[key] = [_server_seconds(step, scenario, timing, number) for step in steps]
        return self.served[key]

    @cached_property
    def _windows(self) -> dict[int, list[GeneratedStep]]:
        """Return by window size the steps that one server generates until the mix of the slots is stationary, and some more."""
        found = {}
        for window in self.windows:
            scenario = self._scenario(with_window(self.config, window))
            scenario = replace(scenario, num_servers=1, limits=ServerLimits(), num_slots=scenario.num_trained)
            slots = SlotProcess(scenario, self.workload.lengths.draw, self.workload.prompts.draw, np.random.default_rng(self.seed))
            found[window] = [slots.generate(step, Timing()) for step in range(_num_steps(scenario))]
        return found

    @cached_property
    def _settled(self) -> dict[int, StepWork]:
        return {window: work_of(steps[-1], 0) for window, steps in self._windows.items()}

    @cached_property
    def _scenarios(self) -> dict[tuple[object, ...], Scenario]:
        return {}

    def _scenario(self, config: Config) -> Scenario:
        """Scenario of ordinary steps: without warm-up, evaluation and checkpoints, and of one round of dynamic sampling."""
        rollout, kind = config.rollout, (config.batch.window_tokens, config.rollout.placement)
        if kind not in self._scenarios:
            algorithm = config.algorithm
            once = replace(algorithm, dynamic_sampling=replace(algorithm.dynamic_sampling, enabled=False))
            scenario = make_scenario(replace(config, algorithm=once))
            self._scenarios[kind] = replace(scenario, critic_warmup_steps=0, save_every_steps=0, eval_every_steps=0)
        shares = config.parallel.num_ranks / rollout.tensor_parallel_size
        return replace(self._scenarios[kind], num_servers=rollout.num_servers, ranks_per_server=shares)

    def _limited(self, config: Config) -> Scenario:
        scenario = self._scenario(config)
        tokens = scenario.limits.kv_tokens or estimated_kv_tokens(config, self.gpu, self.facts)
        return replace(scenario, limits=replace(scenario.limits, kv_tokens=tokens))

    def _simulated(self, config: Config, works: dict[tuple[int | str, ...], list[StepWork]]) -> RankedPlan:
        scenario, timing, rollout = self._limited(config), estimated_timing(config, self.gpu, self.facts), config.rollout
        key = (config.batch.window_tokens, rollout.tensor_parallel_size, rollout.num_servers, str(scenario.limits))
        # Which tokens a window has depends on its seconds.
        if key not in works and (scenario.over_samples or self.workload.waits is not None):
            works[key] = simulated_works(scenario, self.workload, timing, num_steps=_num_steps(scenario), seed=self.seed)
        elif key not in works:
            steps = self._windows[config.batch.window_tokens]
            seconds = self._server_s(config.batch.window_tokens, steps, scenario, timing, _SIMULATED)
            served = [replace(step, server_s=server_s) for step, server_s in zip(steps, seconds, strict=True)]
            works[key] = [work_of(one, step) for step, one in enumerate(served)]
        return RankedPlan(config, compute_means(on_clock(scenario, works[key], timing)))


def in_order(bounds: Iterable[tuple[float, Config]]) -> list[Config]:
    """Return the plans of ``PlanRanking.bounds``, those with the lowest bounds first."""
    return [config for _, config in sorted(bounds, key=lambda pair: _order(*pair))]


def _num_steps(scenario: Scenario) -> int:
    return scenario.num_settling_steps + max(_FEWEST_STEPS, min(_MOST_STEPS, _RESPONSES_THAT_COUNT // scenario.num_slots))


def _server_seconds(window: GeneratedStep, scenario: Scenario, timing: Timing, number: int) -> tuple[float, ...]:
    """Return the seconds in which the first ``number`` servers generate the window, whose rows are spread evenly over all servers."""
    return tuple(one.seconds for one in serve_rows(window.generated, scenario, timing, number))


def _trainer_seconds(scenario: Scenario, work: StepWork, timing: Timing) -> dict[str, float]:
    stages = (stage.name for stage in scenario.graph if Resource.trainer in stage.occupies and stage.name != GENERATE)
    return {name: stage_seconds(name, work, 0, scenario, timing) for name in stages}


def _step_bound(config: Config, generate_s: float, trains: Mapping[str, float]) -> float:
    facts, total = facts_of(config), sum(trains.values())
    if facts.alternates:
        return generate_s + total
    if facts.ahead:
        return max(generate_s, total)
    # The critic trains while the next window is generated.
    return max(generate_s + total - trains.get(UPDATE_CRITIC, 0.0), total)


def _various(configs: Sequence[Config], number: int) -> list[Config]:
    """Return the best plan per combination of GPU split, server size and window, at most ``number``. ``configs``: best first."""
    best: dict[tuple[object, ...], Config] = {}
    for config in configs:
        rollout = config.rollout
        place = (config.parallel.num_ranks, rollout.placement, rollout.tensor_parallel_size, config.batch.window_tokens)
        best.setdefault(place, config)
    return list(best.values())[:number]


def _order(seconds: float, config: Config) -> tuple[float, ...]:
    parallel = config.parallel
    shared = ranks_of_replica(parallel) / parallel.pipeline_parallel_size
    experts = parallel.expert_parallel_size * expert_tensor_size(parallel) if parallel.expert_parallel_size > 1 else 1
    recomputes = list(Recompute).index(config.policy.recompute)
    alike = round(math.log(seconds) / _SAME) if 0 < seconds < math.inf else math.inf
    return (alike, recomputes, shared, parallel.pipeline_parallel_size, experts, parallel.virtual_pipeline_size, seconds)


def with_window(config: Config, window: int) -> Config:
    return replace(config, batch=replace(config.batch, window_tokens=window))


def usual_windows(config: Config) -> list[int]:
    """Return the windows to compare if none are given: the recipe's, or a third of the longest response, its half and its double."""
    most = config.batch.max_response_tokens
    own = config.batch.window_tokens or max(most // 3, 1)
    return sorted({window for window in (max(own // 2, 1), own, 2 * own) if window <= most})
