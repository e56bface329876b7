"""Published steps of other systems, for tools/published_points.py: the C rows, with the lengths that they are taken to have."""

import functools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

import numpy as np

from megatron_rl.config.layout import parse_layout, ranks_of_replica
from megatron_rl.config.load import load_config
from megatron_rl.desk.costs.gpus import Gpu, gpu
from megatron_rl.desk.costs.parameter_counts import num_parameters
from megatron_rl.desk.costs.serving_time import kv_tokens
from megatron_rl.desk.costs.training_time import REINFORCEMENT, publish_seconds, training_seconds
from megatron_rl.desk.simulate.decoding import ServerLimits, ServerRequests, serve
from megatron_rl.desk.simulate.estimated_costs import estimated_kv_tokens, estimated_timing, server_timing
from megatron_rl.desk.simulate.lengths import named_lengths
from megatron_rl.desk.simulate.prediction import Workload, compute_means, predict
from megatron_rl.desk.simulate.scenario import make_scenario
from megatron_rl.desk.simulate.timing import Timing
from megatron_rl.families.flops import flops_cost
from megatron_rl.families.model_facts import as_config, read_model_json

NEMO_RL = "NVIDIA-NeMo/RL@7ea279abf docs/about/performance-summary.md, v0.6"
NEMO_RL_DENSE = "NVIDIA-NeMo/RL@06beed91b docs/about/performance-summary.md, v0.4"
VERL = "verl-project/verl@1dda039b9 docs/advance/fully_async.md"
MODELS = Path(__file__).parent / "published" / "models"


@dataclass(frozen=True)
class Point:
    name: str
    what: str
    unit: str
    published: float
    ours: Callable[[], float]
    source: str
    """Document and row."""
    within: float
    """The relative error that it may have."""
    is_fitted: bool = False
    why: str = ""
    """Reason why a row is beyond its tolerance."""

    def error(self) -> float:
        return self.ours() / self.published - 1


@functools.cache
def model(name: str) -> Any:
    """The sizes in a model's config.json, as the hub has them."""
    return as_config(read_model_json(MODELS / name))


def log_normal(number: int, mean: float, longest: int, sigma: float) -> list[int]:
    """``number`` quantiles of a log-normal distribution cut at ``longest`` whose mean is ``mean`` after the cut; descending."""
    normal = NormalDist()
    shape = [sigma * normal.inv_cdf((index + 0.5) / number) for index in range(number)]
    low, high = 0.0, 1.0e6
    for _ in range(60):
        middle = (low + high) / 2
        lengths = [min(middle * 2.718281828**x, longest) for x in shape]
        low, high = (middle, high) if fmean(lengths) < mean else (low, middle)
    return sorted((max(round(length), 1) for length in lengths), reverse=True)


def generation_seconds(timing: Timing, limits: ServerLimits, lengths: Sequence[int], *, prompt_tokens: int, longest: int) -> float:
    """Seconds until a server has generated responses of ``lengths`` [tokens] of at most ``longest``, started in this order."""
    prompts, rooms = np.full(len(lengths), prompt_tokens), np.full(len(lengths), longest)
    return serve(ServerRequests(prompts, np.array(lengths), rooms, rooms), timing, limits).seconds


def stream_seconds(timing: Timing, limits: ServerLimits, lengths: Sequence[int], *, prompt_tokens: int, longest: int) -> float:
    """Seconds per batch of a server that never drains: batches like ``lengths`` follow one another."""
    # Filling and draining cancel in the difference of two runs, if both are longer than the running responses.
    held = prompt_tokens + fmean(lengths) / 2
    most = min(limits.running or math.inf, limits.kv_tokens / held if limits.kv_tokens else math.inf)
    times = max(3, math.ceil(3 * most / len(lengths)))
    few, more = (
        generation_seconds(timing, limits, [*lengths] * number, prompt_tokens=prompt_tokens, longest=longest)
        for number in (times, 2 * times)
    )
    return (more - few) / times


def straggler_factor(
    costs: Sequence[float], *, num_replicas: int, sequences_per_update: int, num_deals: int = 8
) -> float:
    """Seconds of a batch's updates over those of evenly balanced ones: every update waits for its slowest replica.

    ``costs``: cost of each sequence in the batch, in any unit. Updates and replicas get equal numbers of sequences
    in random order, as in trainers that balance nothing or only whole batches. Returns the mean over ``num_deals``
    fixed orders.
    """
    slowest = 0.0
    for deal in range(num_deals):
        order = random.Random(deal).sample(range(len(costs)), len(costs))
        for start in range(0, len(order), sequences_per_update):
            update = order[start : start + sequences_per_update]
            slowest += max(sum(costs[index] for index in update[replica::num_replicas]) for replica in range(num_replicas))
    return slowest * num_replicas / sum(costs) / num_deals


def asynchronous_step_seconds(
    *, train: float, stream: float, publish: float, batch: float = 0.0, staleness: float = 1.0
) -> float:
    """Seconds of a step whose trainer takes batches that servers generate continuously.

    ``stream``: servers' seconds per batch when they never drain. ``batch``: seconds from a batch's first token to
    its last if its responses must start with weights at most ``staleness`` steps old; 0 if responses continue
    across a publish.
    """
    return max(train, stream, batch / staleness) + publish


@dataclass(frozen=True)
class Servers:
    number: int
    gpus: int
    memory_fraction: float
    """Share of the memory for weights and KV cache."""
    device: Gpu
    most_running: int = 0

    def generate(self, name: str, lengths: Sequence[int], prompt: int, longest: int, *, drains: bool = True) -> float:
        """Seconds per batch, to the end of its longest response or, without that wait, of a continuous stream."""
        # Every server gets the same mixture; the one with the longest response is asked.
        mine = list(lengths)[:: self.number]
        room = kv_tokens(model(name), self.device, num_gpus=self.gpus, memory_fraction=self.memory_fraction)
        # Their client sends everything at once, and vLLM promises a request nothing but its own tokens.
        limits = ServerLimits(self.most_running, int(room), sent_share=math.inf, conservativeness=0)
        seconds = generation_seconds if drains else stream_seconds
        timing = server_timing(model(name), self.device, self.gpus)
        return seconds(timing, limits, _mixed(mine), prompt_tokens=prompt, longest=longest)


def _mixed(lengths: Sequence[int]) -> list[int]:
    """The lengths in an order that has nothing to do with them, the same every time."""
    return [lengths[index] for index in sorted(range(len(lengths)), key=lambda index: index * 0.6180339887 % 1)]


PROMPT = 150
"""Tokens of a mathematics problem in a chat template; the rows publish prompts and responses together."""


@dataclass(frozen=True)
class NemoRl:
    """A row of NeMo-RL's summary. Passes: log-probs of policy and reference, update; recomputation where its recipe has it.

    Weights go from shard to shard, without whole tensors in between.
    """

    model: str
    sequences: int
    mean: int
    longest: int
    """Tokens of a sequence with its prompt."""
    servers: Servers
    layout: str
    ranks: int
    passes: float
    staleness: float = 0.0
    updates: int = 1

    def seconds(self) -> float:
        parallel, _ = parse_layout(self.layout)
        lengths = log_normal(self.sequences, self.mean - PROMPT, self.longest - PROMPT, 0.9)
        packs = self.sequences * self.mean / self.longest / self.updates * ranks_of_replica(parallel) / self.ranks
        train = training_seconds(
            model(self.model),
            parallel,
            gpu("H100-80G"),
            [length + PROMPT for length in lengths],
            num_ranks=self.ranks,
            passes=self.passes,
            num_packs=max(round(packs), 1),
            efficiency=REINFORCEMENT,
        )
        publish = publish_seconds(
            2 * num_parameters(model(self.model)),
            gpu("H100-80G"),
            way="point_to_point",
            num_stages=parallel.pipeline_parallel_size,
            num_server_gpus=self.servers.number * self.servers.gpus,
            gpus_per_server=self.servers.gpus,
        )
        longest = self.longest - PROMPT
        batch = self.servers.generate(self.model, lengths, PROMPT, longest)
        if not self.staleness:
            return batch + train + publish
        stream = self.servers.generate(self.model, lengths, PROMPT, longest, drains=False)
        return asynchronous_step_seconds(
            train=train, stream=stream, publish=publish, batch=batch, staleness=self.staleness
        )


def nemo_points() -> Iterable[Point]:
    h100 = gpu("H100-80G")
    small = "0.36 million tokens per step: the costs of 671B parameters outside the passes dominate, and no closed form has them"
    a3b, a22b, v3, dense32, dense8 = "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "qwen3-32b", "llama3-8b"
    # name, what, published seconds, row, whether fitted, why it lies further off
    rows: list[tuple[str, str, float, NemoRl, bool, str]] = [
        ("C1", "on policy, 32 H100", 192,
         NemoRl(a3b, 2048, 3203, 4096, Servers(16, 2, 0.6, h100), "ep8", 32, 5, updates=4), True, ""),
        ("C2", "1 step off, 16 + 16 H100", 152,
         NemoRl(a3b, 2048, 3201, 4096, Servers(8, 2, 0.8, h100), "pp2+ep8", 16, 5, 1, 4), True, ""),
        ("C3", "8 steps off, 128 + 64 H100", 34.5,
         NemoRl(a3b, 2048, 3206, 4096, Servers(32, 2, 0.8, h100), "ep8", 128, 5, 8, 4), False, ""),
        ("C4", "on policy, 128 H100", 395,
         NemoRl(a22b, 512, 5698, 8192, Servers(8, 16, 0.6, h100), "tp2+cp2+pp8+ep16+etp1", 128, 6), True, ""),
        ("C5", "on policy, 256 H100", 312,
         NemoRl(a22b, 512, 5713, 8192, Servers(16, 16, 0.6, h100), "tp2+cp2+pp8+ep16+etp1", 256, 6), False, ""),
        ("C6", "1 step off, 128 + 128 H100", 231,
         NemoRl(a22b, 512, 5721, 8192, Servers(16, 8, 0.88, h100), "tp4+pp8+ep16+etp1", 128, 6, 1), True, ""),
        ("C7", "on policy, 256 H100", 134,
         NemoRl(v3, 512, 701, 1536, Servers(8, 32, 0.6, h100), "pp16+ep16", 256, 6), False, small),
        ("C8", "1 step off, 256 + 256 H100", 64.1,
         NemoRl(v3, 512, 710, 1536, Servers(8, 32, 0.8, h100), "pp16+ep16", 256, 6, 1), False, small),
        ("C21", "on policy, 32 H100", 393,
         NemoRl(dense32, 2048, 3206, 4096, Servers(8, 4, 0.6, h100), "tp4+pp4", 32, 5, updates=4), False, ""),
        ("C22", "1 step off, 32 + 32 H100", 215,
         NemoRl(dense32, 2048, 3207, 4096, Servers(8, 4, 0.8, h100), "tp4+pp4", 32, 5, 1, 4), False, ""),
        ("C23", "on policy, 16 H100", 97.7,
         NemoRl(dense8, 2048, 1060, 4096, Servers(16, 1, 0.6, h100), "pp2", 16, 6, updates=4), False, ""),
        ("C24", "1 step off, 8 + 8 H100", 74.6,
         NemoRl(dense8, 2048, 1129, 4096, Servers(8, 1, 0.8, h100), "pp2", 8, 6, 1, 4), False, ""),
    ]  # fmt: skip
    for name, what, published, row, is_fitted, why in rows:
        yield Point(
            name, f"step of {row.model}, NeMo-RL, {what}", "s", published, functools.cache(row.seconds),
            f"{NEMO_RL_DENSE if row.model in (dense32, dense8) else NEMO_RL}, {row.model}", 0.20, is_fitted, why,
        )  # fmt: skip


def simulated_points() -> Iterable[Point]:
    """Two rows once more, on the stage table of this trainer's runs, as `megatron-rl simulate --gpu` does it."""
    c1 = (
        "parallel.num_ranks=32 parallel.expert_parallel_size=8 rollout.num_servers=16 rollout.tensor_parallel_size=2 "
        "batch.num_prompts_per_step=64 batch.policy_minibatch_size=512"
    )
    c4 = (
        "parallel.num_ranks=128 parallel.tensor_parallel_size=2 parallel.sequence_parallel=true parallel.context_parallel_size=2 "
        "parallel.pipeline_parallel_size=8 parallel.pipeline_layers=[11,12,12,12,12,12,12,11] parallel.expert_parallel_size=16 "
        "parallel.expert_tensor_parallel_size=1 policy.recompute=full rollout.num_servers=8 rollout.tensor_parallel_size=16 "
        "batch.num_prompts_per_step=16 batch.policy_minibatch_size=512 batch.max_tokens_per_microbatch=8192"
    )
    for name, model_name, mean, longest, words, published in (
        ("C1", "qwen3-30b-a3b", 3203, 4096, c1, 192),
        ("C4", "qwen3-235b-a22b", 5698, 8192, c4, 395),
    ):
        ours = functools.cache(functools.partial(_simulated_step, model_name, mean - PROMPT, longest - PROMPT, words))
        yield Point(
            name, f"the same step of {model_name}, simulated on our stage table", "s", published, ours,
            f"{NEMO_RL}, {model_name}", 0.20, is_fitted=True,
        )  # fmt: skip


def _simulated_step(model_name: str, mean: int, longest: int, words: str) -> float:
    common = (
        f"preset=grpo policy.path={MODELS / model_name} batch.num_samples_per_prompt=32 batch.max_response_tokens={longest} "
        "rollout.placement=colocated rollout.max_inflight_requests=4096 rollout.server_args.mem-fraction-static=0.6"
    )
    config, device = load_config(None, [*common.split(), *words.split()]), gpu("H100-80G")
    scenario = make_scenario(config)
    # Their client sends everything at once.
    room = replace(scenario.limits, kv_tokens=estimated_kv_tokens(config, device), sent_share=math.inf)
    workload = Workload(named_lengths(f"lognormal:mean={mean},sigma=0.9,max={longest}"), named_lengths(f"fixed:length={PROMPT}"))
    timing = estimated_timing(config, device)
    return compute_means(predict(replace(scenario, limits=room), workload, timing, num_steps=5, seed=1)).step_s


@dataclass(frozen=True)
class Verl:
    """DAPO with Qwen2.5-Math-7B and responses of up to 28k on H20s. verl does not publish their lengths: these are a log-normal
    body and a few that run to the limit, such that generation on 64 GPUs takes what was measured there."""

    body_mean: float = 500.0
    run_away: float = 0.002
    share_of_peak: float = 0.581
    """Fitted to update_actor at 64 GPUs."""
    colocated_s: float = 40.5
    """Seconds of a colocated step outside generation, log-probs and update; fitted to the step at 64 GPUs."""

    NUMBER, LONGEST, UPDATE, GROUP = 512 * 16, 28 * 1024, 32 * 16, 4

    def lengths(self) -> list[int]:
        longest = [self.LONGEST] * round(self.NUMBER * self.run_away)
        return longest + log_normal(self.NUMBER - len(longest), self.body_mean, self.LONGEST, 0.8)

    @functools.cache  # noqa: B019
    def generation(self, gpus: int) -> float:
        return self._servers(gpus).generate("qwen2.5-math-7b", self.lengths(), PROMPT, self.LONGEST)

    @functools.cache  # noqa: B019
    def stream(self, gpus: int) -> float:
        return self._servers(gpus).generate("qwen2.5-math-7b", self.lengths(), PROMPT, self.LONGEST, drains=False)

    def passes(self, gpus: int, passes: float, sequences: int) -> float:
        """Seconds of forward passes' worth over the batch, of which ``sequences`` at a time; sequences are shared by 4 GPUs."""
        flops = flops_cost(model("qwen2.5-math-7b"))
        costs = [flops(length + PROMPT) for length in self.lengths()]
        factor = straggler_factor(costs, num_replicas=gpus // self.GROUP, sequences_per_update=sequences)
        return passes * sum(costs) / (gpus * gpu("H20").flops["bfloat16"] * self.share_of_peak) * factor

    def update(self, gpus: int) -> float:
        return self.passes(gpus, 4, self.UPDATE)

    def step(self, gpus: int) -> float:
        """Colocated and synchronous."""
        return self.generation(gpus) + self.passes(gpus, 1, self.NUMBER) + self.update(gpus) + self.colocated_s

    def asynchronous(self, gpus: int) -> float:
        """``gpus`` of each kind; responses go on over a publish, the servers' own log-probs are the old ones."""
        return asynchronous_step_seconds(train=self.update(gpus), stream=self.stream(gpus), publish=self._publish(gpus))

    def streamed(self, gpus: int) -> float:
        """Step without staleness: the trainer takes each quarter of the batch when it is ready; the servers wait for the last update."""
        return self.generation(gpus) + self.update(gpus) / 4 + self._publish(gpus)

    def _publish(self, gpus: int) -> float:
        size = 2 * num_parameters(model("qwen2.5-math-7b"))
        return publish_seconds(
            size, gpu("H20"), way="broadcast", num_stages=1, num_server_gpus=gpus, gpus_per_server=self.GROUP
        )

    def _servers(self, gpus: int) -> Servers:
        return Servers(gpus // self.GROUP, self.GROUP, 0.8, gpu("H20"), 1024)


def verl_points() -> Iterable[Point]:
    verl = Verl()
    other = "its run had longer responses: its generation and its update both take more than twice those of 64 GPUs"
    rows: list[tuple[str, str, float, Callable[[], float], bool, str]] = [
        ("C10", "generation, 64 H20, colocated", 150.72, lambda: verl.generation(64), True, ""),
        ("C10", "update, 64 H20, colocated", 133.41, lambda: verl.update(64), True, ""),
        ("C10", "step, 64 H20, colocated and synchronous", 365.28, lambda: verl.step(64), True, ""),
        ("C10", "step, 128 H20, colocated and synchronous", 356.30, lambda: verl.step(128), False, ""),
        ("C10", "step, 32 H20, colocated and synchronous", 790.10, lambda: verl.step(32), False, other),
        ("C11", "step, 32 + 32 H20, fully asynchronous", 189.26, lambda: verl.asynchronous(32), False, ""),
        ("C11", "its gain over 64 H20 in sync", 365.28 / 189.26, lambda: verl.step(64) / verl.asynchronous(32), False, ""),
        ("C11", "step, 16 + 16 H20, fully asynchronous", 294.77, lambda: verl.asynchronous(16), False, ""),
        ("C11", "step, 64 + 64 H20, fully asynchronous", 150.63, lambda: verl.asynchronous(64), False, ""),
        ("C12", "step, 64 + 64 H20, staleness 0, streamed", 231.34, lambda: verl.streamed(64), False, ""),
        ("C12", "step, 64 + 64 H20, staleness .1", 171.30, lambda: verl.asynchronous(64), False,
         "a tenth of a batch ahead hides only a part of the tail; the closed form knows no part"),
        ("C12", "step, 64 + 64 H20, staleness .3", 146.11, lambda: verl.asynchronous(64), False, ""),
    ]  # fmt: skip
    for name, what, published, ours, is_fitted, why in rows:
        unit = "times" if "gain" in what else "s"
        yield Point(
            name, f"{what}: Qwen2.5-Math-7B, verl, 28k", unit, published, functools.cache(ours), f"{VERL}, {what}", 0.20, is_fitted, why
        )
