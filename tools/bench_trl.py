"""Compare a GRPO step of this project and of TRL's GRPOTrainer, alternating on the same cores, with equal inputs and loss.

    python tools/bench_trl.py --start outputs/arithmetic --trl-python /path/to/trl/bin/python

``--start`` is a folder of examples/arithmetic/warm_start.sh (`sft` and `task` are read). TRL needs other library versions than
this project and therefore a separate environment; if it is missing, the program prints how to create it. Both train in
float32 from the same weights: 64 prompts x 4 responses per step, 2 updates of 128 responses, at most 80 tokens, temperature 1, KL
coefficient .01 against the start. Both score with the same function. Neither evaluates, saves or tracks
during the measurement. Medians over the steps after the first three; the ratio is of tokens per second, repeat by repeat. Wall seconds are
meaningful only on an idle machine: on shared cores, TRL's threads wait for each other. CPU seconds of all processes are valid there
also, with ``--trl-threads 1``.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

TRL = "_trl"
"""First argument of the process that this program starts in TRL's environment."""
NUM_WARM_UP_STEPS = 3
NUM_RESPONSES = 4
LEARNING_RATE = 2.0e-4
HOW_TO_MAKE_ONE = """python3.11 -m venv /tmp/trl
    /tmp/trl/bin/pip install torch=={torch} trl==1.16.0
    python tools/bench_trl.py --trl-python /tmp/trl/bin/python"""


def last_number(completion: str, answer: str) -> float:
    """The reward of both: 1 if the last number of the text is the answer."""
    numbers = re.findall(r"\d+", completion)
    return float(bool(numbers) and int(numbers[-1]) == int(answer))


def main() -> None:
    if sys.argv[1:2] == [TRL]:
        run_trl(json.loads(sys.argv[2]))
        return
    arguments = parse()
    found: dict[str, list[dict[str, float]]] = {"megatron_rl": [], "TRL": []}
    with tempfile.TemporaryDirectory() as folder:
        asked = arguments | {"folder": folder}
        for _ in range(arguments["repeats"]):
            found["megatron_rl"].append(summary(run_ours(asked)))
            found["TRL"].append(summary(run_in_trl_environment(asked)))
            print_repeat(found)
    ratios = [ours["tokens_per_s"] / theirs["tokens_per_s"] for ours, theirs in zip(*found.values(), strict=True)]
    print(f"tokens per second of megatron_rl over TRL: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")
    if arguments["json"]:
        Path(arguments["json"]).write_text(json.dumps(found | {"ratios": ratios}, indent=2) + "\n")


def parse() -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", default="outputs/arithmetic", help="folder of examples/arithmetic/warm_start.sh")
    parser.add_argument("--trl-python", default=os.environ.get("TRL_PYTHON", ""), help="TRL's Python (default: TRL_PYTHON)")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--response-tokens", type=int, default=80)
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="trainer ranks of megatron_rl")
    parser.add_argument("--trl-threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of TRL (default: all cores)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of megatron_rl's recipe")
    arguments = vars(parser.parse_args())
    for name in ("sft/config.json", "task/train.jsonl"):
        if not Path(arguments["start"], name).is_file():
            parser.error(
                f"--start: expected {name} in {arguments['start']}; make it with "
                f"`bash examples/arithmetic/warm_start.sh {arguments['start']}`"
            )
    if arguments["steps"] < NUM_WARM_UP_STEPS + 2:
        parser.error(
            f"--steps is at least {NUM_WARM_UP_STEPS + 2}: the first {NUM_WARM_UP_STEPS} and the last do not count"
        )
    refuse_without_trl(parser, arguments["trl_python"])
    return arguments


def refuse_without_trl(parser: argparse.ArgumentParser, python: str) -> None:
    """Ends the program where that interpreter has no TRL."""
    import torch

    recipe = HOW_TO_MAKE_ONE.format(torch=torch.__version__.split("+")[0])
    if not python:
        parser.error(f"--trl-python: expected the Python of an environment that has TRL; make one:\n    {recipe}")
    try:
        probe = subprocess.run([python, "-c", "import trl"], capture_output=True, text=True)
    except OSError as error:
        parser.error(f"--trl-python: {python} cannot be run ({error.strerror}); make an environment:\n    {recipe}")
    if probe.returncode:
        last = (probe.stderr.strip().splitlines() or ["no message"])[-1]
        parser.error(f"--trl-python: {python} cannot import trl ({last}); make an environment:\n    {recipe}")


# ------------------------------------------------------------------------------------------------------------- ours


def run_ours(asked: dict[str, Any]) -> list[dict[str, float]]:
    """Seconds and tokens of each step."""
    start, folder = Path(asked["start"]).resolve(), Path(asked["folder"])
    keys = {
        "preset": "grpo",
        "algorithm.kl.coef": 0.01,
        "run.output_dir": folder / "ours",
        "run.overwrite": "true",
        "run.num_steps": asked["steps"],
        "run.save_every_steps": 0,
        "policy.path": start / "sft",
        "policy.dtype": "float32",
        "policy.optimizer": f"{{lr: {LEARNING_RATE}, min_lr: 0.0, warmup_steps: 10, decay_style: constant, weight_decay: 0.0}}",
        "parallel.num_ranks": asked["ranks"],
        "batch.num_prompts_per_step": asked["prompts"],
        "batch.num_samples_per_prompt": NUM_RESPONSES,
        "batch.max_prompt_tokens": 48,
        "batch.max_response_tokens": asked["response_tokens"],
        "batch.policy_minibatch_size": asked["prompts"] * NUM_RESPONSES // 2,
        "batch.max_tokens_per_microbatch": 8192,
        "data.train_files": f"[{start / 'task' / 'train.jsonl'}]",
        "reward.name": "bench_trl:score",
        "rollout.server_args": "{disable-radix-cache: true}",
        "eval.every_steps": 0,
        "tracking.mlflow": "false",
        "tracking.report_every_steps": 0,
    }
    (folder / "empty.yaml").write_text("{}\n")
    words = [f"{key}={value}" for key, value in keys.items()] + asked["overrides"]
    command = [sys.executable, "-m", "megatron_rl.cli", "train", "--config", str(folder / "empty.yaml"), *words]
    metrics = folder / "ours" / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    cpu = _run(command, {"PYTHONPATH": str(Path(__file__).resolve().parent)}, metrics)
    from megatron_rl.tracking.metrics_file import read_metrics

    trainer_stages = ("old_logprobs", "reference_logprobs", "update_policy")
    return [
        {
            "seconds": row.metrics["step/time_s"],
            "tokens": row.metrics["step/tokens_generated"],
            "generation": row.metrics["time/generate_s"],
            "training": sum(row.metrics[f"time/{stage}_s"] for stage in trainer_stages),
            "cpu": cpu.get(row.step, math.nan) - cpu.get(row.step - 1, math.nan),
            "reward": row.metrics["reward/mean"],
        }
        for row in read_metrics(metrics)
    ]


def score(response: str, answer: str) -> float:
    """``last_number`` as our rewards are called."""
    return last_number(response, answer)


# -------------------------------------------------------------------------------------------------------------- TRL


def run_in_trl_environment(asked: dict[str, Any]) -> list[dict[str, float]]:
    environment = {"OMP_NUM_THREADS": str(asked["trl_threads"])}
    _run([asked["trl_python"], __file__, TRL, json.dumps(asked)], environment)
    return json.loads(Path(asked["folder"], "trl.json").read_text())


def run_trl(asked: dict[str, Any]) -> None:
    """Train with TRL, and write seconds and tokens of each step."""
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(asked["trl_threads"])
    start, num_responses = Path(asked["start"]).resolve(), asked["prompts"] * NUM_RESPONSES
    settings = GRPOConfig(
        output_dir=str(Path(asked["folder"], "trl")),
        max_steps=2 * asked["steps"],
        per_device_train_batch_size=num_responses // 2,
        generation_batch_size=num_responses,
        num_generations=NUM_RESPONSES,
        max_completion_length=asked["response_tokens"],
        temperature=1.0,
        beta=0.01,
        loss_type="grpo",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        weight_decay=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    rewards: list[float] = []

    def reward(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
        scores = [last_number(*pair) for pair in zip(completions, answer, strict=True)]
        rewards.append(statistics.mean(scores))
        return scores

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(start / "sft", dtype=torch.float32),
        reward_funcs=reward,
        args=settings,
        train_dataset=load_dataset(
            "json", data_files=str(start / "task" / "train.jsonl"), split="train"
        ).select_columns(["prompt", "answer"]),
        processing_class=AutoTokenizer.from_pretrained(start / "sft", padding_side="left"),
    )
    clock = _Clock()
    trainer._generate_single_turn = clock.generating(trainer._generate_single_turn)
    trainer._generate_and_score_completions = clock.before(trainer._generate_and_score_completions)
    trainer.train()
    clock.begin()
    Path(asked["folder"], "trl.json").write_text(json.dumps(clock.steps(rewards)))


class _Clock:
    """Steps of TRL: each begins where responses are asked for."""

    def __init__(self) -> None:
        self._began: list[float] = []
        self._cpu: list[float] = []
        self._generation: list[float] = []
        self._tokens: list[int] = []

    def begin(self) -> None:
        self._began.append(time.perf_counter())
        self._cpu.append(time.process_time())

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose call begins a step."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.begin()
            return function(*args, **kwargs)

        return run

    def generating(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which generates; its first result is the responses' token ids."""

        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = function(*args, **kwargs)
            self._generation.append(time.perf_counter() - began)
            self._tokens.append(sum(len(ids) for ids in result[0]))
            return result

        return run

    def steps(self, rewards: Sequence[float]) -> list[dict[str, float]]:
        """The first pass over the responses (log-probs of the reference) counts as training, as it does here."""
        spans = zip(itertools.pairwise(self._began), itertools.pairwise(self._cpu), strict=True)
        return [
            {
                "seconds": end - begin,
                "tokens": tokens,
                "generation": generation,
                "training": end - begin - generation,
                "cpu": cpu_end - cpu_begin,
                "reward": reward,
            }
            for ((begin, end), (cpu_begin, cpu_end)), generation, tokens, reward in zip(
                spans, self._generation, self._tokens, rewards, strict=True
            )
        ]


# ------------------------------------------------------------------------------------------------------ the account


def summary(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Medians over the steps in between: the first ones warm up, the last one saves."""
    steady = steps[NUM_WARM_UP_STEPS:-1]
    medians = {name: statistics.median(step[name] for step in steady) for name in steady[0]}
    return medians | {"tokens_per_s": sum(s["tokens"] for s in steady) / sum(s["seconds"] for s in steady)}


def print_repeat(found: dict[str, list[dict[str, float]]]) -> None:
    print(f"repeat {len(found['TRL'])}; medians per step")
    print(
        f"{'':14}{'seconds':>9}{'generation':>12}{'training':>10}{'tokens':>8}{'tokens/s':>10}{'CPU s':>8}{'reward':>8}"
    )
    for name, repeats in found.items():
        s = repeats[-1]
        print(
            f"{name:14}{s['seconds']:9.3f}{s['generation']:12.3f}{s['training']:10.3f}{s['tokens']:8.0f}"
            f"{s['tokens_per_s']:10.0f}{s['cpu']:8.3f}{s['reward']:8.3f}",
            flush=True,
        )


def _run(command: Sequence[str], more: dict[str, str], metrics: Path | None = None) -> dict[int, float]:
    """The command to its end; with ``metrics``, by its number of lines the CPU seconds of all its processes until then."""
    cpu: dict[int, float] = {}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, env={**os.environ, **more}, stdout=said, stderr=subprocess.STDOUT)
        while process.poll() is None:
            if metrics is not None and metrics.is_file():
                num_lines = metrics.read_text().count("\n")
                if num_lines not in cpu:
                    cpu[num_lines] = _cpu_seconds(process.pid)
            time.sleep(0.02)
        if process.returncode:
            said.seek(0)
            print(said.read()[-6000:], file=sys.stderr)
            sys.exit(f"bench_trl: {command[0]} ended with status {process.returncode}; its last words are above")
    return cpu


def _cpu_seconds(pid: int) -> float:
    """So far, of a process and all that it started and that lives."""
    import psutil

    own, total = psutil.Process(pid), 0.0
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            used = process.cpu_times()
            total += used.user + used.system
    return total


if __name__ == "__main__":
    main()
