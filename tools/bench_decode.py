"""Measure decode steps on a CPU, by sequences and by length, and the time of N responses of given lengths.

A tiny model with random weights is served by this project's CPU stack and by SGLang's own ``torch_native`` with PyTorch's
operators, and run by ``transformers.generate``, alternating; medians are printed. Lengths are forced (no end-of-text). The
time of a step is the difference between many tokens and one token, divided by their number, without prefill and HTTP.
CPU milliseconds are the scheduler's own, so they are valid on a shared machine.

    python tools/bench_decode.py --sequences 1 16 64 128 --lengths-held 64 256 1024 --prefill 64 300
    python tools/bench_decode.py --lengths pareto:1.15,55,900 --responses 512 --slots 128 --json mixture.json
"""

import argparse
import json
import math
import os
import random
import statistics
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from megatron_rl.errors import UserError
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops

ENGINES = ("ours", "torch_native", "transformers")
STOCK = {"MEGATRON_RL_STOCK_KERNELS": "1"}
PROMPT_TOKENS = 32
Run = Callable[[list[list[int]], list[int]], tuple[float, float]]
"""Wall seconds, and CPU seconds of the engine, for prompts with given numbers of new tokens."""


def main() -> None:
    arguments = parse()
    num_prefilled, prefilled = arguments.prefill or (0, 0)
    longest = max(prefilled, *arguments.lengths_held) + arguments.steps + 1
    try:
        lengths = response_lengths(arguments.lengths, arguments.responses, arguments.seed) if arguments.lengths else []
    except (ValueError, OSError) as error:
        raise SystemExit(f"--lengths {arguments.lengths}: {error}") from error
    num_cached = max(
        longest * max(num_prefilled, *arguments.sequences), (PROMPT_TOKENS + max([0, *lengths])) * arguments.slots
    )
    with tempfile.TemporaryDirectory() as folder, ExitStack() as engines:
        make_model(Path(folder), arguments, context=max(longest, PROMPT_TOKENS + max([0, *lengths])) + 16)
        runs = {
            engine: engines.enter_context(
                transformers_engine(folder, arguments)
                if engine == "transformers"
                else server_engine(folder, arguments, engine, num_cached + 4096)
            )
            for engine in arguments.engines
        }
        cells = finishing(runs, lengths, arguments) if lengths else step_times(runs, arguments)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(dict(settings=vars(arguments), cells=cells), indent=1))
    show(cells, arguments.engines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 16, 64, 128])
    parser.add_argument("--lengths-held", type=int, nargs="+", default=[64, 256, 1024], help="tokens per sequence")
    parser.add_argument("--prefill", type=int, nargs=2, metavar=("SEQUENCES", "TOKENS"), help="also: prompts without cache")
    parser.add_argument("--lengths", default="", help="pareto:SHAPE,MEAN,MOST, lognormal:MEDIAN,SIGMA,MOST, or a file")
    parser.add_argument("--responses", type=int, default=256, help="number of responses with --lengths")
    parser.add_argument("--slots", type=int, default=128, help="concurrent responses with --lengths")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--family", choices=("qwen2", "qwen3", "llama"), default="qwen3")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    for name in ("sequences", "lengths_held", "prefill"):
        if min(getattr(arguments, name) or [1]) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected numbers of at least 1")
    for name in ("responses", "slots", "steps", "repeats", "threads", "layers"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(arguments, name)}")
    if arguments.hidden < 8 or arguments.hidden % 8:
        parser.error(f"--hidden: expected a multiple of 8 (4 heads of even size), got {arguments.hidden}")
    if arguments.vocab < 8:
        parser.error(f"--vocab: expected at least 8, got {arguments.vocab}")
    return arguments


def response_lengths(spec: str, num: int, seed: int) -> list[int]:
    """``num`` lengths of at least 1; a file is read from its beginning as often as needed."""
    kind, _, rest = spec.partition(":")
    if kind not in ("pareto", "lognormal"):
        numbers = [int(word) for word in Path(spec).read_text().split()]
        if not numbers or min(numbers) < 1:
            raise ValueError("expected whole numbers of at least 1 in the file")
        return [numbers[i % len(numbers)] for i in range(num)]
    try:
        first, second, most = (float(value) for value in rest.split(","))
    except ValueError:
        raise ValueError("expected three numbers, as in pareto:1.15,55,900 or lognormal:40,1.2,900") from None
    if min(first, second) <= 0 or most < 1 or (kind == "pareto" and second >= most):
        raise ValueError("expected numbers above 0, and a mean below the longest")
    generator = random.Random(seed)
    if kind == "lognormal":
        drawn = [first * generator.lognormvariate(0.0, second) for _ in range(num)]
    else:
        scale = pareto_scale(first, second, most)
        drawn = [scale * generator.paretovariate(first) for _ in range(num)]
    return [max(1, round(min(most, length))) for length in drawn]


def pareto_scale(shape: float, mean: float, most: float) -> float:
    """The least length of a Pareto distribution cut off at ``most`` whose mean is ``mean``."""
    low, high = 0.0, most
    for _ in range(100):
        scale = (low + high) / 2
        # E[min(X, m)] = scale + the integral of (scale / x)**shape from scale to m
        tail = scale / most
        rest = -scale * math.log(tail) if shape == 1 else scale * (1 - tail ** (shape - 1)) / (shape - 1)
        low, high = (scale, high) if scale + rest < mean else (low, scale)
    return low


def make_model(folder: Path, arguments: argparse.Namespace, *, context: int) -> None:
    declare_torchvision_ops()
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        arguments.family,
        vocab_size=arguments.vocab,
        hidden_size=arguments.hidden,
        intermediate_size=2 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=arguments.hidden // 4,
        max_position_embeddings=context,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    torch.manual_seed(arguments.seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@contextmanager
def server_engine(folder: str, arguments: argparse.Namespace, engine: str, num_cached: int) -> Iterator[Run]:
    from megatron_rl.rollout.sglang.process.options import ServerOptions
    from megatron_rl.rollout.sglang.process.server import SglangServer

    at_once = most_at_once(arguments)
    options = ServerOptions(
        folder,
        deterministic=True,
        num_threads=arguments.threads,
        server_args={"max-total-tokens": num_cached, "max-running-requests": at_once},
        env=STOCK if engine == "torch_native" else {},
    )
    server = SglangServer(options, Path(folder) / f"{engine}.log")
    try:
        server.start()
        # The engine is the process that computes; SGLang names it so.
        (scheduler,) = [p for p in psutil.Process(server.pid).children(recursive=True) if "scheduler" in p.name()]

        def run(prompts: list[list[int]], counts: list[int]) -> tuple[float, float]:
            before, began = processor_seconds(scheduler), time.perf_counter()
            generate(server.url, prompts, counts)
            return time.perf_counter() - began, processor_seconds(scheduler) - before

        yield run
    finally:
        server.stop(grace_s=0.0)


def most_at_once(arguments: argparse.Namespace) -> int:
    """Responses that an engine generates together."""
    num_prefilled = (arguments.prefill or (0, 0))[0]
    return arguments.slots if arguments.lengths else max(num_prefilled, *arguments.sequences)


def processor_seconds(process: psutil.Process) -> float:
    """CPU seconds of all threads of the process, in nanosecond resolution if the kernel reports it (``cpu_times`` counts hundredths)."""
    try:
        tasks = Path(f"/proc/{process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    except (OSError, ValueError, IndexError):
        times = process.cpu_times()
        return times.user + times.system


def generate(url: str, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> None:
    """Generate with one HTTP call; ``counts`` has the number of tokens of each response."""
    body = {
        "rid": [uuid.uuid4().hex for _ in prompts],
        "input_ids": prompts,
        "return_logprob": True,
        "sampling_params": [
            {"max_new_tokens": count, "temperature": 1.0, "ignore_eos": True, "sampling_seed": i}
            for i, count in enumerate(counts)
        ],
    }
    call = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(call, timeout=3600) as answer:
        samples = json.loads(answer.read())
    if [len(sample["output_ids"]) for sample in samples] != list(counts):
        raise SystemExit("the server did not generate as many tokens as it was asked for")


@contextmanager
def transformers_engine(folder: str, arguments: argparse.Namespace) -> Iterator[Run]:
    """Batches of equal prompts, each until its longest response ends, as ``generate`` does."""
    declare_torchvision_ops()
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    at_once = most_at_once(arguments)

    def run(prompts: list[list[int]], counts: list[int]) -> tuple[float, float]:
        before, began = time.process_time(), time.perf_counter()
        for first in range(0, len(prompts), at_once):
            part = slice(first, first + at_once)
            longest = max(counts[part])
            model.generate(
                torch.tensor(prompts[part]), do_sample=True, max_new_tokens=longest, min_new_tokens=longest
            )
        return time.perf_counter() - began, time.process_time() - before

    yield run


def random_prompts(num: int, length: int, vocab: int, salt: str = "") -> list[list[int]]:
    generator = random.Random(f"{num} {length} {salt}")
    return [[generator.randrange(3, vocab) for _ in range(length)] for _ in range(num)]


def step_times(runs: dict[str, Run], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of a step, per number of sequences and tokens that each holds."""
    cells: list[dict[str, Any]] = []
    for length in arguments.lengths_held:
        for num in arguments.sequences:
            prompts = random_prompts(num, length, arguments.vocab)
            measured: dict[str, list[tuple[float, ...]]] = {engine: [] for engine in runs}
            for repeat in range(arguments.repeats + 1):
                for engine, run in runs.items():
                    few, many = run(prompts, [1] * num), run(prompts, [1 + arguments.steps] * num)
                    if repeat:  # the first fills caches
                        measured[engine].append(
                            tuple(1e3 * (b - a) / arguments.steps for a, b in zip(few, many, strict=True))
                        )
            cells.append(cell(f"{num} x {length}", measured))
    return [*cells, *([prefill(runs, arguments)] if arguments.prefill else [])]


def prefill(runs: dict[str, Run], arguments: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds until each of some prompts that nobody has seen before has its first token."""
    num, length = arguments.prefill
    measured: dict[str, list[tuple[float, ...]]] = {engine: [] for engine in runs}
    for repeat in range(arguments.repeats + 1):
        prompts = random_prompts(num, length, arguments.vocab, salt=f"prefill {repeat}")
        for engine, run in runs.items():
            times = run(prompts, [1] * num)
            if repeat:
                measured[engine].append(tuple(1e3 * value for value in times))
    return cell(f"prefill {num} x {length}", measured)


def finishing(runs: dict[str, Run], lengths: list[int], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds until all responses have ended."""
    prompts = random_prompts(len(lengths), PROMPT_TOKENS, arguments.vocab)
    measured: dict[str, list[tuple[float, ...]]] = {engine: [] for engine in runs}
    for repeat in range(arguments.repeats + 1):
        for engine, run in runs.items():
            times = run(prompts, lengths)
            if repeat:
                measured[engine].append(tuple(1e3 * value for value in times))
    print(f"{len(lengths)} responses, {sum(lengths)} tokens, longest {max(lengths)}, {arguments.slots} at once")
    return [cell(f"{len(lengths)} responses", measured)]


def cell(name: str, measured: dict[str, list[tuple[float, ...]]]) -> dict[str, Any]:
    """Row of a table with the medians of a cell."""
    return dict(
        cell=name,
        ms={engine: statistics.median(t[0] for t in times) for engine, times in measured.items()},
        processor_ms={engine: statistics.median(t[1] for t in times) for engine, times in measured.items()},
    )


def show(cells: list[dict[str, Any]], engines: Sequence[str]) -> None:
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f}; milliseconds (processor milliseconds), ratio to the first engine")
    print("| sequences x tokens | " + " | ".join(engines) + " |")
    print("|---" * (len(engines) + 1) + "|")
    for row in cells:
        first = row["ms"][engines[0]]
        texts = [
            f"{row['ms'][engine]:.2f} ({row['processor_ms'][engine]:.2f}) x{row['ms'][engine] / first:.1f}"
            for engine in engines
        ]
        print(f"| {row['cell']} | " + " | ".join(texts) + " |")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(str(error)) from error
