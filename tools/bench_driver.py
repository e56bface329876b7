"""Measure the driver's cost of a step (rank 0): the project's code on synthetic replies, without models and GPUs.

    python tools/bench_driver.py                                     # 1/32 of 8,192 slots, scaled up
    python tools/bench_driver.py --share 1                           # all slots: 6 GiB
    python tools/bench_driver.py --share 1/8 --routes 48x8x128       # with R3 of Qwen3-30B-A3B: 5 GiB; all slots: 40
    python tools/bench_driver.py --lengths pareto:1.5:2000 --json found.json
    python tools/bench_driver.py --images 1 --share 1/64             # an image of 1,024 x 768 pixels in each prompt

The pool is in its steady state: responses of the given lengths, cut at ``--cut``, grow by a window a step and are replaced when
they end. ``tools/stub_servers.py`` answers with SGLang's JSON over sockets. What goes to the ranks is packed as in a run and
counted where it would enter a socket; ``--replicas`` of ``--ranks-per-replica`` ranks take it, ``--ranks-per-node`` of them on the
driver's machine. Each prompt has ``--images`` photos, 150 kB of JPEG and 999 tokens (patches of 14 pixels, 2 x 2 merged); rank 0
cuts those of its own sequences. CPU seconds are those of the driver's process (rollout workers have a line of their own), of one
step, scaled to all slots; what rank 0 does as any rank of a replica, with its own share of the sequences, is a part by
itself. A stall is the CPU time of one callback on the event loop. Workers have been started, have made their connections and have
generated what the responses hold before the window begins, as in every step of a run but its first. Fixed costs of a call are
scaled too: a large share is exact, a small one on the careful side.
"""

import argparse
import asyncio
import gc
import io
import json
import math
import os
import pickle
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil

from megatron_rl.errors import UserError

_OWN_SHARE = "rank 0's own sequences"
_BESIDE = "the rank that receives for rank 0's replica"
"""No process of the driver's."""
NUM_SAMPLES = 16
"""Responses of a prompt."""
MODEL = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
"""Model (7B) whose FLOPs determine the micro-batches."""
VISION_MODEL = {
    "model_type": "qwen2_5_vl", "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652,
    "vision_end_token_id": 151653, "text_config": {"vocab_size": 152064},
    "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
}  # fmt: skip
IMAGE_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14,
    "temporal_patch_size": 2, "merge_size": 2,
}  # fmt: skip
IMAGE_SIZE, IMAGE_TOKENS = (1024, 768), 999
IMAGE_SENT_BYTES, IMAGE_CUT_BYTES = 3_000_000, 19_000_000
BYTES_PER_TOKEN, BYTES_PER_PROCESS = 85, 200_000_000
"""Measured bytes: what the driver's arrays take for each token of prompts and responses, without routes; and what a process takes
without tokens."""


LEAST = {
    "slots": 1, "cut": 16, "window": 1, "prompt_tokens": 1, "images": 0, "servers": 1, "workers": 0, "nodes": 1, "replicas": 1,
    "ranks_per_replica": 1, "ranks_per_node": 1, "seed": 0,
}  # fmt: skip
"""Whole numbers of the command line."""


def check(arguments: argparse.Namespace) -> None:
    """Raises UserError for what cannot be measured."""
    for name, least in LEAST.items():
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected at least {least}")
    if not 0 < arguments.median < math.inf:
        raise UserError(f"--median {arguments.median}: expected a number of tokens above 0")
    if not 0 <= arguments.sigma < math.inf:
        raise UserError(f"--sigma {arguments.sigma}: expected at least 0")
    share = re.fullmatch(r"(\d*\.?\d+)(?:/(\d+))?", arguments.share)
    if share is None or not 0 < float(share[1]) <= int(share[2] or 1):
        raise UserError(f"--share {arguments.share}: expected a part of the slots above 0 and at most 1, as 1/32 or 0.125")
    if arguments.routes:
        words = re.fullmatch(r"(\d+)x(\d+)x(\d+)", arguments.routes)
        if words is None or not (int(words[1]) and 1 <= int(words[2]) <= int(words[3])):
            raise UserError(f"--routes {arguments.routes}: expected layers x experts of a token x experts, as 48x8x128")
    if arguments.nodes > 1 and arguments.workers == 0:
        raise UserError(f"--nodes {arguments.nodes}: only rollout workers have others on further nodes; leave --workers 0 out")
    if arguments.json and not Path(arguments.json).absolute().parent.is_dir():
        raise UserError(f"--json {arguments.json}: its folder does not exist")


def check_memory(arguments: argparse.Namespace, context_tokens: int) -> None:
    """Raises UserError where what the run holds, ``context_tokens`` at the end of the window, is more than this machine has free."""
    from megatron_rl.system.processes.host_memory import available_bytes

    layers, top_k, experts = map(int, (arguments.routes or "0x0x0").split("x"))
    num_prompts = len_of(arguments) // NUM_SAMPLES
    of_images = arguments.images * num_prompts * (IMAGE_SENT_BYTES + 2 * IMAGE_CUT_BYTES // arguments.replicas)
    of_slots = context_tokens * (BYTES_PER_TOKEN + 1.1 * layers * top_k * (1 if experts <= 255 else 2)) + of_images
    processes = 2 + arguments.servers + (arguments.workers or 1) * arguments.nodes
    free = available_bytes() - processes * BYTES_PER_PROCESS
    if of_slots > free:
        needed, there = ((size + processes * BYTES_PER_PROCESS) / 2**30 for size in (of_slots, free))
        fits = free * num_prompts // of_slots  # groups
        remedy = (
            f"--share 1/{math.ceil(arguments.slots / (fits * NUM_SAMPLES))} fits"
            if fits >= 1
            else "not even 16 slots fit: take shorter responses (--cut) or smaller routes"
        )
        raise UserError(
            f"--share {arguments.share}: {len_of(arguments)} slots hold about {needed:.1f} GiB with these lengths"
            f"{' and routes' * bool(arguments.routes)}, and {there:.1f} GiB are free here; {remedy}"
        )


class Meter:
    """CPU seconds by part, the longest callback of an event loop, and bytes by way."""

    def __init__(self, nodes: Sequence[Any] = ()) -> None:
        self.cpu_s: dict[str, float] = defaultdict(float)
        self._adding = threading.Lock()
        self.bytes: Counter[str] = Counter()
        self.stall_s = self.workers_cpu_s = self.further_cpu_s = 0.0
        self.held_per_live_byte = 0.0
        """Memory of the rollout workers' files; 0: there are none."""
        self.nodes = nodes

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the CPU seconds of the whole process as a part; its ``inner`` parts are not counted twice."""
        gc.collect()
        began_s, before = time.process_time(), sum(self.cpu_s.values())
        yield
        self.cpu_s[name] += time.process_time() - began_s - (sum(self.cpu_s.values()) - before)

    def inner(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose CPU time on its thread counts as ``name``."""

        def timed(*args: Any, **options: Any) -> Any:
            began_s = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                with self._adding:
                    self.cpu_s[name] += time.thread_time() - began_s

        return timed

    @contextmanager
    def stalls(self) -> Iterator[None]:
        """Notes the longest callback of all event loops inside."""
        handles: Any = asyncio.events.Handle
        run = handles._run

        def timed(handle: Any) -> None:
            began_s = time.thread_time()
            run(handle)
            self.stall_s = max(self.stall_s, time.thread_time() - began_s)

        handles._run = timed
        try:
            yield
        finally:
            handles._run = run


def lengths_of(spec: str, number: int, arguments: argparse.Namespace, random: np.random.Generator) -> np.ndarray:
    """Whole lengths of ``number`` responses: log-normal, ``pareto:ALPHA:LEAST``, or as ``desk/simulate/lengths.py`` reads ``spec``.

    Raises UserError for what it cannot read.
    """
    from megatron_rl.desk.simulate.lengths import named_lengths, read_lengths

    if not spec:
        drawn = np.exp(random.normal(np.log(arguments.median), arguments.sigma, number))
    elif spec.startswith("pareto:") and "=" not in spec:
        found = re.fullmatch(r"pareto:(\d*\.?\d+):(\d*\.?\d+)", spec)
        alpha, least = map(float, found.groups() if found is not None else (0, 0))
        if not alpha or not least:
            raise UserError(f"--lengths {spec}: expected pareto:ALPHA:LEAST with numbers above 0, as pareto:1.5:2000")
        drawn = least * (1 + random.pareto(alpha, number))
    else:
        lengths = read_lengths(Path(spec)) if Path(spec).is_file() else named_lengths(spec)
        drawn = lengths.draw(random, number)
    return np.clip(drawn, 16, arguments.cut).astype(np.int64)


def steps_before(arguments: argparse.Namespace) -> int:
    """After so many the pool is in its steady state: the longest responses have been replaced three times."""
    return 3 * math.ceil(arguments.cut / arguments.window)


def steady_slots(arguments: argparse.Namespace, num_slots: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(whole length, tokens so far) of each slot after some steps."""
    total, done = lengths_of(arguments.lengths, num_slots, arguments, random), np.zeros(num_slots, dtype=np.int64)
    for _ in range(steps_before(arguments)):
        done = np.minimum(total, done + arguments.window)
        over = done >= total
        total[over], done[over] = lengths_of(arguments.lengths, int(over.sum()), arguments, random), 0
    return total, done


def vision_of(folder: Path) -> Any:
    """The image processor of a model whose other files nobody reads."""
    from megatron_rl.data.vision import ImageProcessor

    (folder / "config.json").write_text(json.dumps(VISION_MODEL))
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR))
    return ImageProcessor(folder)


def photo(random: np.random.Generator, file: Path) -> Any:
    """A picture with the noise of a camera, as a row gives it."""
    from PIL import Image

    from megatron_rl.data.images import ImageSource

    width, height = IMAGE_SIZE
    smooth = Image.fromarray(random.integers(0, 256, (24, 32, 3), dtype=np.uint8)).resize(IMAGE_SIZE)
    noisy = np.asarray(smooth, np.float32) + random.normal(0, 8, (height, width, 3)).astype(np.float32)
    data = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(data, "JPEG", quality=85)
    file.write_bytes(data.getvalue())
    return ImageSource(file.name, str(file))


def pool_of(arguments: argparse.Namespace, num_slots: int, random: np.random.Generator, vision: Any) -> Any:
    """A slot pool, with prompts for all of its slots."""
    from megatron_rl.data.sampler import PromptSampler
    from megatron_rl.data.slots import SlotPool
    from megatron_rl.data.trajectory import Prompt, Trajectory

    def prompt(index: int) -> Prompt:
        ids = random.integers(1000, 150_000, arguments.prompt_tokens).tolist()
        images = [vision.reference(photo(random, vision.path / f"{index}-{i}.jpg")) for i in range(arguments.images)]
        for _ in images:
            ids += [vision.start_token_id, *[vision.image_token_id] * IMAGE_TOKENS, vision.end_token_id]
        return Prompt(str(index), tuple(ids), text="x" * 1000, answer="42", type="math", images=tuple(images))

    def start(prompt: Prompt, id: int, *, group_id: int, sample_index: int) -> Trajectory:
        return Trajectory(id, prompt, group_id, sample_index, max_response_tokens=arguments.cut)

    prompts = [prompt(index) for index in range(num_slots // NUM_SAMPLES)]
    return SlotPool(PromptSampler(prompts, seed=1), start, num_slots=num_slots, num_samples_per_prompt=NUM_SAMPLES)


@contextmanager
def stub_servers(arguments: argparse.Namespace, total: np.ndarray) -> Iterator[list[str]]:
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        np.save(file, total)
        file.flush()
        command = [sys.executable, str(Path(__file__).with_name("stub_servers.py")), file.name]
        command += ["--servers", str(arguments.servers), "--image-tokens", str(IMAGE_TOKENS)]
        command += ["--prompt-tokens", str(arguments.prompt_tokens + arguments.images * (IMAGE_TOKENS + 2))]
        command += ["--routes", arguments.routes] if arguments.routes else []
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            try:
                yield json.loads(process.stdout.readline())
            finally:
                process.kill()


@contextmanager
def seen_inside(meter: Meter) -> Iterator[None]:
    """Parts of a generation that are functions of their own, wherever the package's modules have taken them in."""
    import orjson

    named = SimpleNamespace(
        dumps=meter.inner("requests", orjson.dumps), loads=meter.inner("parsing", orjson.loads), **{
            name: value for name, value in vars(orjson).items() if name not in ("dumps", "loads", "__name__")
        },
    )  # fmt: skip
    parts = dict.fromkeys(("validate", "generate_body", "sent_ids"), "requests")
    parts |= dict.fromkeys(("read_json", "parse_generation"), "parsing")
    before = []
    for module in [m for name, m in sys.modules.items() if name.startswith("megatron_rl.rollout")]:
        found: dict[str, Any] = {name: meter.inner(part, getattr(module, name)) for name, part in parts.items() if hasattr(module, name)}
        if getattr(module, "orjson", None) is orjson:
            found["orjson"] = named
        for name, value in found.items():
            before.append((module, name, getattr(module, name)))
            setattr(module, name, value)
    from megatron_rl.rollout.windows import WindowGenerator

    append = WindowGenerator._append
    WindowGenerator._append = meter.inner("storing", append)  # type: ignore[method-assign]
    try:
        yield
    finally:
        WindowGenerator._append = append  # type: ignore[method-assign]
        for module, name, value in before:
            setattr(module, name, value)


_NODE = """
import pickle, sys
from megatron_rl.rollout.workers import remote_workers as node_workers
print(pickle.dumps(node_workers._start(int(sys.argv[1]))).hex(), flush=True)
sys.stdin.read()
"""


@contextmanager
def further_nodes(number: int, num_workers: int, meter: Meter) -> Iterator[None]:
    """``meter.nodes``: what the first ranks of so many nodes have started: processes of this machine, but nothing is mapped across."""
    command = [sys.executable, "-c", _NODE, str(num_workers)]
    nodes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(number)]
    try:
        meter.nodes = [pickle.loads(bytes.fromhex(node.stdout.readline().decode())) for node in nodes if node.stdout is not None]
        yield
    finally:
        for node in nodes:
            node.kill()
            node.wait()


def workers_of(nodes: Sequence[Any]) -> list[Any]:
    from megatron_rl.rollout.workers.remote_calls import RemoteWorkerInfo
    from megatron_rl.system.files.shared_file import NODE

    return [
        RemoteWorkerInfo(node.host, port, node.secret, number * NODE + node.pid, fd)
        for number, node in enumerate(nodes, 1)
        for port, fd in node.listeners
    ]


def count_routes(meter: Meter, trajectories: Sequence[Any]) -> None:
    """Bytes of them on the driver's machine and on others."""
    from megatron_rl.system.files.shared_file import NODE, address_of

    for routes in [t.routes[1] for t in trajectories if t.routes is not None]:
        address = address_of(routes)
        is_far = address is not None and address.pid >= NODE
        meter.bytes["routes read on other nodes" if is_far else "routes read on the driver's machine"] += routes.nbytes


async def carry(client: Any, plan: Any, trajectories: Sequence[Any], done: np.ndarray, arguments: argparse.Namespace) -> None:
    """Generate the tokens of earlier steps: ``done`` tokens of each response in windows, with values.

    The servers generate them, so that they are in the shared files of the rollout workers, as in a run.
    """
    from megatron_rl.data.trajectory import Segment
    from megatron_rl.rollout.windows import WindowGenerator

    for trajectory, held in zip(trajectories, done.tolist(), strict=True):
        trajectory.first_window_tokens = held
    # By weights before the present ones: no server has a prefix cache that serves them.
    before = replace(plan, sampling=replace(plan.sampling, routes=None, vision=None), trains_meanwhile=True)
    window = WindowGenerator(client, _lost, before, step=0, num_tokens=arguments.cut, weight_version=0, kind="before")
    await window.generate([t for t in trajectories if t.first_window_tokens])
    for trajectory in trajectories:
        held, whole = trajectory.first_window_tokens, trajectory.segments
        starts = range(0, held, arguments.window)
        trajectory.first_window_tokens, trajectory.segments = 0, []
        for step, start in enumerate(starts, start=steps_before(arguments) - len(starts)):
            part = slice(start, min(start + arguments.window, held))
            ids, logprobs = whole[0].token_ids[part], whole[0].rollout_logprobs[part]
            trajectory.segments.append(Segment(ids, logprobs, 1, "length", step))
            trajectory.old_values.append(logprobs.copy())


def cpu_s_of(pids: Sequence[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def generate(
    arguments: argparse.Namespace,
    meter: Meter,
    trajectories: Sequence[Any],
    done: np.ndarray,
    urls: Sequence[str],
    vision: Any,
) -> None:
    """One window of all slots, over sockets."""
    from megatron_rl.config.derived import num_rollout_workers
    from megatron_rl.config.schema import BatchConfig, Config, RolloutConfig
    from megatron_rl.rollout.generation import GenerationPlan, Sampling
    from megatron_rl.rollout.requests import GenerationRequest, RouteShape
    from megatron_rl.rollout.sglang.balance.client import SglangClient
    from megatron_rl.rollout.sglang.wire import batch_call
    from megatron_rl.rollout.windows import WindowGenerator
    from megatron_rl.rollout.workers.worker_pool import WorkerPool

    layers, top_k, experts = map(int, (arguments.routes or "0x0x0").split("x"))
    routes = RouteShape(layers, top_k, experts) if arguments.routes else None
    batch_call.loops_in_background().result()  # compiles
    plan = GenerationPlan(Sampling(1.0, 1.0, -1, (2,), seed=1, routes=routes, vision=vision), decode=str)
    batch = BatchConfig(num_prompts_per_step=arguments.slots, num_samples_per_prompt=1, window_tokens=arguments.window)
    config = Config(batch=batch, rollout=RolloutConfig(num_workers=arguments.workers))
    workers = num_rollout_workers(config, arguments.servers, os.cpu_count() or 1)

    async def fill() -> None:
        async with SglangClient(urls, vocab_size=152_064, hang_timeout_s=0.0, request_timeout_s=3600.0) as client:
            if workers:
                client.caller = WorkerPool(workers, print, workers_of(meter.nodes))
            # As every step of a run but its first finds them: workers that run, connections that are open, tokens that are there.
            await asyncio.gather(*[client.generate(GenerationRequest(f"warm-{index}", [5], 1)) for index in range(64)])
            await carry(client, plan, trajectories, done, arguments)
            meter.cpu_s.clear()
            near = client.caller.pids if isinstance(client.caller, WorkerPool) else []
            far = [child.pid for node in meter.nodes for child in psutil.Process(node.pid).children()]
            meter.workers_cpu_s, meter.further_cpu_s = -cpu_s_of(near), -cpu_s_of(far)
            step = steps_before(arguments)
            window = WindowGenerator(client, _lost, plan, step=step, num_tokens=arguments.window, weight_version=1, kind="train")
            with meter.stalls(), meter.part("HTTP and event loop"):
                await window.generate(trajectories)
            if workers:
                await asyncio.sleep(0.5)  # the workers free what has been dropped
                meter.held_per_live_byte = held_per_live_byte(trajectories)
            meter.workers_cpu_s += cpu_s_of(near)
            meter.further_cpu_s += cpu_s_of(far)

    with seen_inside(meter):
        asyncio.run(fill())
    with meter.part("garbage collection"):
        gc.collect()  # as a run does when it publishes
    count_routes(meter, trajectories)


def held_per_live_byte(trajectories: Sequence[Any]) -> float:
    """Memory that the rollout workers' files of this machine hold, per byte that the responses refer to."""
    from megatron_rl.system.files.shared_file import NODE, address_of

    held = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            if "megatron_rl_rollout" in os.readlink(link):
                status = link.stat()
                held[status.st_ino] = status.st_blocks * 512
    arrays = [array for t in trajectories for s in t.segments for array in (s.token_ids, s.rollout_logprobs) if len(array)]
    arrays += [t.routes[1] for t in trajectories if t.routes is not None]
    found = [address for address in map(address_of, arrays) if address is not None and address.pid < NODE]
    return sum(held.values()) / sum(address.num_bytes for address in found) if found else 0.0


async def _lost(error: Exception) -> None:
    raise error


class Ranks:
    """An engine of rank 0 that answers zeros at once; it puts each micro-batch together when its turn comes, as a real one."""

    is_output_rank = True
    routes_shape = (1, 1)

    def __init__(self, role: str, arguments: argparse.Namespace, meter: Meter) -> None:
        import torch

        from megatron_rl.config.schema import ParallelConfig
        from megatron_rl.families.model_facts import as_config
        from megatron_rl.parallel.topology import Topology

        size = arguments.ranks_per_replica
        self.role, self.hf_config, self.memory = role, as_config(MODEL), SimpleNamespace(base=None)
        self._joined = meter.inner(_OWN_SHARE, lambda one: one.joined())
        self.parallel = ParallelConfig(tensor_parallel_size=size, num_ranks=size * arguments.replicas)
        self.topology = Topology(
            0, size * arguments.replicas, 0, size, 0, 1, 0, arguments.replicas, torch.device("cpu")
        )

    def offload(self, *, keep_weights: bool = False) -> None:
        pass

    def logprobs(self, microbatches: Sequence[Any], **_: Any) -> list[Any]:
        import torch

        _wait_for_images(microbatches)
        return [torch.zeros(len(self._joined(one).tokens)) for one in microbatches]

    def values(self, microbatches: Sequence[Any]) -> list[Any]:
        import torch

        _wait_for_images(microbatches)
        return [(torch.zeros(len(self._joined(one).tokens)), torch.zeros(one.num_sequences)) for one in microbatches]

    def update(self, microbatches: Sequence[Any], loss: Any, **_: Any) -> Any:
        from megatron_rl.training.engine import UpdateResult

        _wait_for_images(microbatches)
        for one in microbatches:
            self._joined(one)
        return UpdateResult(1.0, 0.0, {}, skipped=False)


def _wait_for_images(microbatches: Sequence[Any]) -> None:
    """Wait for images as an encoder does. This rank patches all images of its replica, as without sequence parallelism."""
    for batch in microbatches:
        for image in range(0 if batch.images is None else len(batch.images.grids)):
            batch.images.patches(image)


class Receiving:
    """The work of the rank that receives for rank 0's replica: another rank, or rank 0 if it is alone."""

    def __init__(self, meter: Meter, find: Callable[[Any], Any], num_ranks: int) -> None:
        self._meter, self._find, self._num_ranks = meter, find, num_ranks
        self.sent: dict[int, Any] = {}
        """Newest message of rank 0, by rank."""
        self.for_itself = False
        """True while rank 0 fetches rows that it sends to no other rank."""

    def found(self, flat: Any, part: str = _OWN_SHARE) -> Any:
        """Fetch rows from other nodes that this rank cannot map."""
        self.for_itself = part == _BESIDE or self._num_ranks == 1
        found = self._meter.inner(part, self._find)(flat)
        self.for_itself = False
        return found

    def over_the_replica(self, flat: Any, place: Any, head: Any) -> Any:
        """Rank 0 has what the rank beside it has found; its copy counts, not how it was found."""
        if flat is None:
            flat = self._meter.inner(_OWN_SHARE, self.found(self.sent.pop(head.tp_rank), _BESIDE).clone)()
        return flat


@contextmanager
def counted_group(arguments: argparse.Namespace, meter: Meter, vision: Any) -> Iterator[tuple[Any, Any]]:
    """(the project's trainer group, its configuration), with sockets that count in place of those to the other ranks."""
    import torch

    from megatron_rl.config.schema import Config
    from megatron_rl.data.batch import reply_spans
    from megatron_rl.data.rows import Rows
    from megatron_rl.parallel import collectives, hang_report
    from megatron_rl.training import sequence_cache, trainer_group, trainer_rank

    config = Config()
    config.policy.path = str(vision.path) if vision is not None else ""
    config.batch.max_tokens_per_microbatch = arguments.cut + arguments.prompt_tokens + arguments.images * (IMAGE_TOKENS + 2)
    config.batch.policy_minibatch_size = config.batch.critic_minibatch_size = max(1, len_of(arguments) // 16)
    group_module: Any = trainer_group
    restore, size = group_module.restore, arguments.ranks_per_replica * arguments.replicas
    flatten, take = collectives.flatten, sequence_cache.SequenceCache.take
    receiving = Receiving(meter, collectives._found, arguments.ranks_per_replica)

    def flat(payload: Any, *more: Any) -> Any:
        """Notes what of the payload is tokens, routes and images, not their addresses. A rank without others sends nothing on."""
        if receiving.for_itself:
            return flatten(payload, *more)
        if (images := payload.get("image_files")) is not None:
            meter.bytes["images that ranks take"] += images.num_bytes
            meter.bytes["images through rank 0"] += images.num_bytes * (size > 1 and not images.all_nodes)
        meter.bytes["tokens and routes through rank 0"] += sum(
            value.num_bytes
            for name, value in payload.items()
            if size > 1 and isinstance(value, Rows) and not value.all_nodes and (name == "tokens" or value.like.ndim > 2)
        )
        return flatten(payload, *more)

    def send(tensor: Any, peer: int, *_: Any) -> None:
        receiving.sent[peer] = tensor
        meter.bytes["to the ranks"] += tensor.contiguous().view(torch.uint8).numel()

    def answers(batch: Any, plan: Any, results: Any, *, per_sequence: bool) -> Any:
        firsts, ends = reply_spans(batch)
        lengths = (ends - firsts).tolist()
        numbers = [sum(lengths[i] + per_sequence for part in rank for i in part) for rank in plan]
        meter.bytes["from the ranks"] += 4 * sum(numbers[1:])
        return restore(batch, plan, [torch.zeros(number) for number in numbers], per_sequence=per_sequence)

    stand_ins = {
        (collectives, "dist"): SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: size),
        (collectives, "_send"): send,
        (collectives, "gather_tensors"): lambda tensor, **_: [tensor] * size,
        (collectives, "gather_objects"): lambda found, **_: [found and rank < arguments.ranks_per_node for rank in range(size)],
        (collectives, "flatten"): flat,
        (collectives, "_found"): receiving.found,
        (collectives, "unflatten"): meter.inner(_OWN_SHARE, collectives.unflatten),
        (sequence_cache.SequenceCache, "take"): meter.inner(_OWN_SHARE, take),
        (type(vision), "patchify"): meter.inner(_OWN_SHARE, getattr(type(vision), "patchify", print)),
        (collectives, "_broadcast_in_replica"): receiving.over_the_replica,
        (group_module, "restore"): answers,
        (hang_report, "track_activity"): lambda what: nullcontext(),
    }
    before = {key: getattr(*key) for key in stand_ins if hasattr(*key)}
    for key in before:
        setattr(*key, stand_ins[key])
    try:
        engines: Any = {role: Ranks(role, arguments, meter) for role in ("policy", "critic")}
        yield trainer_group.TrainerGroup(trainer_rank.TrainerRank(config, engines["policy"].topology, engines)), config
    finally:
        for key, value in before.items():
            setattr(*key, value)


def len_of(arguments: argparse.Namespace) -> int:
    """Slots that are measured: whole groups."""
    return max(1, round(arguments.slots * Fraction(arguments.share) / NUM_SAMPLES)) * NUM_SAMPLES


def train(arguments: argparse.Namespace, meter: Meter, trajectories: Sequence[Any], step: int, vision: Any) -> None:
    """The trainer stages' part on the driver."""
    import torch

    from megatron_rl.config.schema import AlgorithmConfig, CorrectionConfig
    from megatron_rl.data.trajectory import Score
    from megatron_rl.step import metrics
    from megatron_rl.step.loss_batches import critic_responses, policy_batch, response_batch, store_model_outputs
    from megatron_rl.step.packing import window_batch, window_routes, with_routes
    from megatron_rl.step.stages.update_critic import train_critic
    from megatron_rl.step.stages.update_policy import train_policy
    from megatron_rl.step.updates import planned_updates
    from megatron_rl.step.window_advantages import ModelOutputs, window_advantages

    algorithm = AlgorithmConfig(correction=CorrectionConfig(weight="token"))
    with meter.part("window batch"):
        batch = window_batch(trajectories, step, vision)
        if arguments.routes:
            batch = with_routes(batch, window_routes(trajectories, step))
    finished = [t for t in trajectories if t.finished]
    for index, trajectory in enumerate(finished):
        trajectory.score = Score(float(index % 5 < 2))
    with counted_group(arguments, meter, vision) as (group, config):
        per_node = arguments.ranks_per_node
        for number, node in enumerate(meter.nodes, 1):
            group.transport.add_node(node.service, range(number * per_node, (number + 1) * per_node))
        with group.stage(step, "bench"), meter.part("to and from the ranks"):
            ended = [t.id for t in critic_responses(finished, algorithm)]
            group.share_out(batch, planned_updates(config, batch.ids, ended, step))
            old = group.logprobs(batch, temperature=1.0)
            group.values(batch)
        # What ranks would answer; in place, as they have it already and it is sent to none of them.
        old += batch.fields["rollout_logprobs"] + 0.01 * batch.fields["mask"]
        signals = ModelOutputs(torch.rand(len(batch.tokens)), torch.rand(batch.num_sequences))
        _compile()
        with meter.part("advantages"):
            found = window_advantages(
                trajectories, batch, signals, step=step, window_tokens=arguments.window, algorithm=algorithm
            )
            store_model_outputs(trajectories, batch, signals, step)
        with meter.part("policy batch"):
            of_policy, _ = policy_batch(trajectories, batch, old, found, algorithm)
        with meter.part("critic batch"):
            of_critic = response_batch(finished, algorithm, vision=vision)
        with meter.part("metrics"):
            metrics.rollout_metrics(trajectories, step=step)
            metrics.staleness_metrics(trajectories, of_policy.fields["mask"], 1)
            metrics.reward_metrics(finished)
            metrics.advantage_metrics(batch, found)
            if of_critic is not None:
                metrics.critic_metrics(of_critic)
        with group.stage(step, "bench"), meter.part("to and from the ranks"):
            train_policy(config, group, of_policy, step)
            if of_critic is not None:
                train_critic(config, group, of_critic, step)


def _compile() -> None:
    """The loops that are compiled at their first call."""
    import torch

    from megatron_rl import algorithms

    one, bounds = torch.zeros(2), torch.tensor([0, 2])
    algorithms.gae(one, one, bounds, gamma=1.0, lam=1.0)
    algorithms.monte_carlo_returns(one, bounds, gamma=1.0)
    algorithms.egae(one, one, bounds, torch.tensor([True]), gamma=1.0, lam=1.0)


def checkpoint(meter: Meter, pool: Any, step: int) -> float:
    """Seconds that the driver's main thread is busy; all CPU time counts as the part's."""
    from megatron_rl.run.checkpoint_folder import flatten_state, write_driver_state

    with tempfile.TemporaryDirectory() as folder, meter.part("checkpoint"):
        began_s = time.thread_time()
        pool.release_finished(step)
        state, arrays = flatten_state({"pool": pool.snapshot()()})
        held_up_s = time.thread_time() - began_s
        files = write_driver_state(Path(folder), state, arrays)
        meter.bytes["checkpoint"] = sum(size for size, _ in files.values())
    return held_up_s


def bytes_held(trajectories: Sequence[Any]) -> float:
    """Bytes of memory per token held: arrays with their headers, values among them."""
    arrays = [
        array
        for t in trajectories
        for array in (*(a for s in t.segments for a in (s.token_ids, s.rollout_logprobs)), *t.old_values, *t.token_rewards)
    ]
    return sum(array.nbytes + 112 for array in arrays) / sum(t.num_response_tokens for t in trajectories)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    from megatron_rl.step import updates  # noqa: F401  all of the driver's modules: a run's collector does not look at them
    from megatron_rl.system.processes.gc_pauses import gc_young_only

    with tempfile.TemporaryDirectory() as folder, gc_young_only():
        return _measure(arguments, vision_of(Path(folder)) if arguments.images else None)


def _measure(arguments: argparse.Namespace, vision: Any) -> dict[str, Any]:
    random = np.random.default_rng(arguments.seed)
    num_slots = len_of(arguments)
    total, done = steady_slots(arguments, num_slots, random)
    check_memory(arguments, int((arguments.prompt_tokens + np.minimum(total, done + arguments.window)).sum()))
    pool, meter, step = pool_of(arguments, num_slots, random, vision), Meter(), steps_before(arguments)
    trajectories = pool.fill(step)
    with further_nodes(arguments.nodes - 1, arguments.workers or 1, meter):
        with stub_servers(arguments, total) as urls:
            generate(arguments, meter, trajectories, done, urls, vision)
        expected = int(np.minimum(total - done, arguments.window).sum())
        assert sum(t.window_tokens(step) for t in trajectories) == expected, "the stub servers gave another number of tokens"
        for of_pass, at in ((Meter(meter.nodes), [t.copy() for t in trajectories]), (meter, trajectories)):
            # The second counts: a step of a run finds memory that the steps before it have used already.
            train(arguments, of_pass, at, step, vision)
    meter.cpu_s.pop(_BESIDE, None)
    held = bytes_held(trajectories)
    held_up_s = checkpoint(meter, pool, step)
    scale = arguments.slots / num_slots
    return {
        "slots": num_slots,
        "scale": scale,
        "new_tokens": expected * scale,
        "cpu_s": {name: seconds * scale for name, seconds in meter.cpu_s.items()},
        "workers_cpu_s": meter.workers_cpu_s * scale,
        "further_cpu_s": meter.further_cpu_s * scale,
        "total_cpu_s": sum(meter.cpu_s.values()) * scale,
        "longest_stall_s": meter.stall_s,
        "checkpoint_main_thread_s": held_up_s * scale,
        "gigabytes": {name: number * scale / 1e9 for name, number in meter.bytes.items()},
        "bytes_per_token_held": held,
        "held_per_live_byte": meter.held_per_live_byte,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, default=8192)
    parser.add_argument("--share", default="1/32", help="measured share of the slots; results are scaled up")
    parser.add_argument("--median", type=float, default=6000.0, help="median tokens per response")
    parser.add_argument("--sigma", type=float, default=0.9)
    parser.add_argument("--lengths", default="", help="another distribution: pareto:ALPHA:LEAST, a file, or a name of megatron-rl simulate")
    parser.add_argument("--cut", type=int, default=32768)
    parser.add_argument("--window", type=int, default=8192)
    parser.add_argument("--prompt-tokens", type=int, default=300)
    parser.add_argument("--images", type=int, default=0, help="photos of 1024 x 768 pixels per prompt")
    parser.add_argument("--routes", default="", help="R3 of a model: layers x experts of a token x experts, as 48x8x128")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--workers", type=int, help="rollout worker processes (default: as in a run on this machine)")
    parser.add_argument("--nodes", type=int, default=1, help="with rollout workers; a server more or less each")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--ranks-per-replica", type=int, default=4)
    parser.add_argument("--ranks-per-node", type=int, default=8, help="trainer ranks per node; ranks of the driver's node map its arrays")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", default="")
    return parser.parse_args(words)


def report(found: dict[str, Any]) -> str:
    lines = [f"{found['slots']} slots measured, scaled by {found['scale']:g}: {found['new_tokens'] / 1e6:.1f}M new tokens a step"]
    lines += [f"{name:33s}{seconds:10.2f} CPU s" for name, seconds in found["cpu_s"].items()]
    lines += [f"{'in all':33s}{found['total_cpu_s']:10.2f} CPU s", f"{'rollout workers':33s}{found['workers_cpu_s']:10.2f} CPU s"]
    lines += [f"{'rollout workers of other nodes':33s}{found['further_cpu_s']:10.2f} CPU s"] if found["further_cpu_s"] else []
    lines += [f"{'longest stall':33s}{found['longest_stall_s'] * 1e3:10.1f} ms"]
    lines += [f"{'checkpoint, main thread':33s}{found['checkpoint_main_thread_s']:10.2f} s"]
    lines += [f"{name:36s}{number:7.3f} GB" for name, number in found["gigabytes"].items()]
    if found["held_per_live_byte"]:
        lines.append(f"{'held per live byte, shared files':33s}{found['held_per_live_byte']:10.2f}")
    lines += [f"{'held per token':33s}{found['bytes_per_token_held']:10.1f} bytes", f"{'peak memory':33s}{found['peak_gib']:10.2f} GiB"]
    return "\n".join(lines)


def main() -> None:
    arguments = parse()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that wait for each other would count
    from megatron_rl.system.processes.host_memory import disable_memory_trim

    disable_memory_trim()  # as a run's driver does
    try:
        check(arguments)
        found = measure(arguments)
    except UserError as error:
        sys.exit(f"bench_driver: error: {error}")
    print(report(found))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
