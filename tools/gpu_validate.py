"""Compare this machine's results with a CPU's and measure its speed. Writes a Markdown table and the same data as JSON.

    python tools/gpu_validate.py --out outputs/gpu_validate
    python tools/gpu_validate.py --device cpu --tiny --sections environment,parity,training

Sections: installed packages; log-probs and one update of every family's tiny model against the CPU path; training steps of
random models with tokens per second, MFU and memory; weight sync to a real SGLang server; end-to-end T-PPO steps.
Each section is a process with a deadline: a failed or hung section is named in the table, and the others continue. Every
row is printed and saved as soon as it is measured, so a machine that is taken away leaves what it had. ``--limit-s`` bounds
the whole run; a section that the limit cuts off is named. Exit status 1 if any section failed or was not reached.
``--device cpu --tiny`` runs the same code on the CPU.

Needed are torch and what `python tools/carry_wheels.py` lists; packages may lie on PYTHONPATH alone. Without SGLang the
weights go to a small server (`tools/ipc_server.py`), and the section ``tppo`` is left out.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = ("environment", "parity", "training", "weight_sync", "tppo")
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe")
TRAINING_MODELS = {True: ("tiny-dense", "tiny-moe"), False: ("dense-1.5b", "moe-3b", "dense-3b", "dense-7b")}
"""Models by ``--tiny``; the largest last, because a time limit cuts off the end."""
PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "B100": 1750.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H200": 989.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A30": 165.0,
    "A10G": 70.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
}
"""Dense bfloat16, from the makers' data sheets; the first name that is part of the device's counts."""
FLOAT32_TOLERANCE = 1e-4
BFLOAT16_FACTOR, BFLOAT16_SLACK = 3.0, 2e-3
"""A device in bfloat16 may be this many times as far from the CPU's float32 as the CPU in bfloat16 is."""
STATE_BYTES = 18.0
"""Bytes of one parameter on one rank: bfloat16 weight; float32 gradient, main weight and two moments."""


@dataclass
class Section:
    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    save: Callable[[], None] = field(default=lambda: None, repr=False)

    def add(self, row: dict[str, Any]) -> None:
        """Append a row, print it, and save the tables."""
        self.rows.append(row)
        print("  " + ", ".join(f"{name} {_cell(value)}" for name, value in row.items()), flush=True)
        self.save()


class SectionFailed(Exception):
    """A section's process did not give a result; the message says why."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    sections: list[Section] = []
    end = time.monotonic() + arguments.limit_s

    def save() -> None:
        stored = [{name: value for name, value in vars(section).items() if name != "save"} for section in sections]
        (out / "results.json").write_text(json.dumps(stored, indent=2) + "\n")
        (out / "results.md").write_text(report(sections))

    for name in arguments.sections.split(","):
        print(f"{name} ...", flush=True)
        section, started = Section(name, save=save), time.monotonic()
        sections.append(section)
        arguments.deadline_s = min(arguments.deadline_s, end - started)
        try:
            if arguments.deadline_s <= 0:
                raise SectionFailed(f"not reached within --limit-s {arguments.limit_s:g}")
            with tempfile.TemporaryDirectory(prefix="gpu-validate-") as scratch:
                RUNS[name](section, arguments, Path(scratch))
        except Exception as failure:  # whatever it is, it is this section's, and the others go on
            section.failures.append(str(failure) if isinstance(failure, SectionFailed) else repr(failure))
        section.seconds = time.monotonic() - started
        save()
        for reason in section.failures:
            print(f"  FAILED: {reason}", flush=True)
    print(report(sections))
    return 1 if any(section.failures for section in sections) else 0


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", default="outputs/gpu_validate", help="folder for results.md and results.json")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--tiny", action="store_true", help="models of a few thousand parameters, few steps")
    options.add_argument("--sections", default=",".join(SECTIONS), type=_sections)
    options.add_argument("--families", default="", help="families of the parity section (default: all)")
    options.add_argument("--models", default="", help="models of the training section, such as dense-1.5b,moe-3b")
    options.add_argument("--num-ranks", type=int, default=0, help="ranks of the training section (default: every GPU)")
    options.add_argument("--layout", default="", help='layout of the training section, such as "tp2+sp" or "ep8"')
    options.add_argument(
        "--deadline-s", type=float, default=1800.0, help="deadline of each section's process, in seconds"
    )
    options.add_argument("--limit-s", type=float, default=float("inf"), help="limit of the whole run, in seconds")
    return options


def _sections(text: str) -> str:
    unknown = [name for name in text.split(",") if name not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown section {unknown[0]!r}; expected some of {', '.join(SECTIONS)}")
    return text


# Processes -----------------------------------------------------------------------------------------------------------


def run_section(
    name: str, job: dict[str, Any], scratch: Path, *, device: str, deadline_s: float, num_ranks: int = 1
) -> Iterator[dict[str, Any]]:
    """Yield the rows of ``gpu_sections.py name`` as the section writes them.

    Raises SectionFailed with the end of the section's log, also after some rows.
    """
    rows = scratch / f"{name}-{device}.jsonl"
    rows.write_text("")
    (scratch / "job.json").write_text(json.dumps({**job, "scratch": str(scratch), "out": str(rows)}))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"] if num_ranks > 1 else []
    command = [sys.executable, *launcher, str(ROOT / "tools" / "gpu_sections.py"), name, str(scratch / "job.json")]
    with rows.open() as written:
        for _ in run_process(command, scratch, device, deadline_s, num_ranks):
            yield from map(json.loads, _whole_lines(written))
        yield from map(json.loads, _whole_lines(written))
    if not rows.stat().st_size:
        raise SectionFailed(f"{name}: no result was written; {_tail(scratch / 'log.txt')}")


def _whole_lines(file: TextIO) -> Iterator[str]:
    while True:
        start, line = file.tell(), file.readline()
        if not line.endswith("\n"):  # a line that is still being written is read again
            file.seek(start)
            return
        yield line


def run_process(
    command: list[str], scratch: Path, device: str, deadline_s: float, num_ranks: int = 1
) -> Iterator[None]:
    """Run ``command`` to its end, with all it starts, within the deadline; yields several times per second meanwhile.

    The command's output goes to ``scratch``/log.txt. Raises SectionFailed for a time-out or an exit status.
    """
    # What the caller's PYTHONPATH names stays: a machine without a registry has its packages there.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    num_threads = str(max(1, (os.cpu_count() or 1) // num_ranks))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", num_threads)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        env.pop(name, None)
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    log, end = scratch / "log.txt", time.monotonic() + deadline_s
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None:
                if time.monotonic() > end:
                    raise SectionFailed(f"not done after {deadline_s:.4g} s and stopped; {_tail(log)}")
                time.sleep(0.1)
                yield
        finally:
            if process.poll() is None:
                # Servers live in groups of their own and end with the process that started them.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if process.returncode:
        raise SectionFailed(f"exit status {process.returncode}; {_tail(log)}")


def _tail(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "its last lines: " + " | ".join(lines[-3:]) if lines else "it said nothing"


# Sections ------------------------------------------------------------------------------------------------------------


def environment(section: Section, arguments: argparse.Namespace, scratch: Path) -> None:
    for row in run_section("environment", {}, scratch, device=arguments.device, deadline_s=arguments.deadline_s):
        section.add(row)
    if arguments.device == "cuda" and not any(row["what"].startswith("GPU 0") for row in section.rows):
        section.failures.append("no GPU is visible; use --device cpu to run the same code on the CPU")


def parity(section: Section, arguments: argparse.Namespace, scratch: Path) -> None:
    import torch

    job = {"families": arguments.families.split(",") if arguments.families else list(FAMILIES)}
    kinds = {
        "reference": ("cpu", "float32"),
        "yardstick": ("cpu", "bfloat16"),
        "device": (arguments.device, "bfloat16"),
    }
    if arguments.device == "cpu":
        kinds = {"reference": ("cpu", "float32"), "device": ("cpu", "float32")}
    outputs, errors = {}, {}
    for kind, (device, dtype) in kinds.items():
        rows = run_section("parity", {**job, "dtype": dtype}, scratch, device=device, deadline_s=arguments.deadline_s)
        errors[kind] = {row["family"]: row["error"] for row in rows}
        outputs[kind] = torch.load(scratch / f"parity-{device}.jsonl.pt")
    for family in job["families"]:
        broken = next((f"{kind}: {found[family]}" for kind, found in errors.items() if found[family]), "")
        if broken:
            section.failures.append(f"{family}: {broken}")
            continue
        found = distances(outputs["device"][family], outputs["reference"][family])
        yardstick = (
            distances(outputs["yardstick"][family], outputs["reference"][family]) if "yardstick" in kinds else None
        )
        section.add({"family": family, **found, "verdict": verdict(found, yardstick)})
        if section.rows[-1]["verdict"] != "same":
            section.failures.append(f"{family}: {section.rows[-1]['verdict']}")
    section.notes.append(
        "log-probs and one update against the CPU in float32; mean, because a close choice of experts may fall otherwise"
    )


def distances(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Differences of log-probs and update; the update's distance is relative to its size."""
    difference = (found["logprobs"] - expected["logprobs"]).abs()
    moved = sum(float(change.square().sum()) for change in expected["change"].values()) ** 0.5
    apart = sum(float((found["change"][name] - c).square().sum()) for name, c in expected["change"].items()) ** 0.5
    return {
        "logprob_mean": float(difference.mean()),
        "logprob_max": float(difference.max()),
        "grad_norm": abs(found["grad_norm"] / expected["grad_norm"] - 1.0),
        "update": apart / moved,
    }


def verdict(found: dict[str, float], yardstick: dict[str, float] | None) -> str:
    """same, or which distance is too large; ``yardstick``: the CPU's own distances in the device's precision."""
    for name in ("logprob_mean", "grad_norm", "update"):
        allowed = FLOAT32_TOLERANCE
        if yardstick is not None:
            allowed = BFLOAT16_FACTOR * yardstick[name] + BFLOAT16_SLACK
        if not found[name] <= allowed:
            return f"{name} differs by {found[name]:.2e}, allowed {allowed:.2e}"
    return "same"


def training(section: Section, arguments: argparse.Namespace, scratch: Path) -> None:
    tiny, on_cpu, started = arguments.tiny, arguments.device == "cpu", time.monotonic()
    models = arguments.models.split(",") if arguments.models else TRAINING_MODELS[tiny]
    num_ranks = arguments.num_ranks or (1 if on_cpu else max(1, _num_gpus()))
    job = {
        "layout": arguments.layout or "tp1",
        "dtype": "float32" if on_cpu else "bfloat16",
        "recompute": "none" if tiny else "full",
        "sequence_tokens": 64 if tiny else 4096,
        "sequences_per_replica": 4 if tiny else 8,
        "max_tokens_per_microbatch": 128 if tiny else 8192,
        "num_warmup": 1 if tiny else 2,
        "num_steps": 2 if tiny else 5,
    }
    for model in models:
        try:
            (row,) = run_section(
                "training",
                {**job, "model": model},
                scratch,
                device=arguments.device,
                deadline_s=arguments.deadline_s - (time.monotonic() - started),
                num_ranks=num_ranks,
            )
        except SectionFailed as failure:
            section.failures.append(f"{model}: {failure}")
            continue
        if "too_large" in row:
            section.notes.append(f"{model} was left out: {row['too_large']}")
            continue
        section.add(training_row(model, job["layout"], row))
        if not row["grad_norm"] < float("inf"):
            section.failures.append(f"{model}: the gradient norm is {row['grad_norm']}")
    section.notes.append(
        f"supervised steps in {job['dtype']}, sequences of {job['sequence_tokens']} tokens, recompute {job['recompute']}; "
        "operations: three forward passes (recomputed ones are not counted), peak: dense bfloat16; about "
        f"{STATE_BYTES:g} bytes a parameter on one GPU before activations"
    )


def training_row(model: str, layout: str, row: dict[str, Any]) -> dict[str, Any]:
    tflops = row["flops_per_step"] / row["s_per_step"] / row["num_ranks"] / 1e12
    peak = peak_tflops(row["device"])
    return {
        "model": model,
        "layout": f"{layout}, {row['num_ranks']} ranks",
        "s_per_step": row["s_per_step"],
        "tokens_per_s": row["num_tokens"] / row["s_per_step"],
        "tflops_per_rank": tflops,
        "mfu": tflops / peak if peak else None,
        "peak_gib": row["peak_gib"],
        "grad_norm": row["grad_norm"],
    }


def peak_tflops(device: str) -> float | None:
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device), None)


def weight_sync(section: Section, arguments: argparse.Namespace, scratch: Path) -> None:
    job = {
        "model": "tiny-dense" if arguments.tiny else "dense-1.5b",
        "dtype": "float32" if arguments.device == "cpu" else "bfloat16",
        "bucket_bytes": 2**20 if arguments.tiny else 2**29,
        "num_publishes": 3,
        "timeout_s": arguments.deadline_s / 2,
    }
    for row in run_section("weight_sync", job, scratch, device=arguments.device, deadline_s=arguments.deadline_s):
        section.add(
            {
                "model": job["model"],
                "server": row["server"],
                "way": row["way"],
                "megabytes": row["num_bytes"] / 1e6,
                "seconds": row["seconds"],
                "gb_per_s": row["num_bytes"] / 1e9 / row["seconds"],
                "cuda_graphs": row["cuda_graphs"],
            }
        )
        if row.get("num_differing"):
            section.failures.append(f"{row['way']}: {row['num_differing']} tensors differ on the server afterwards")
    section.notes.append("the first publish of a way makes its connections; on one GPU the server shares the trainer's")


def tppo(section: Section, arguments: argparse.Namespace, scratch: Path) -> None:
    """A few T-PPO steps of an untrained tiny model through the command line: both engines, sync, critic, files."""
    if importlib.util.find_spec("sglang") is None:
        section.notes.append("left out: SGLang is not installed")
        return
    on_cpu = arguments.device == "cpu"
    recipe = _tppo_recipe(scratch, on_cpu=on_cpu, num_steps=3 if arguments.tiny else 20)
    command = [sys.executable, "-m", "megatron_rl.cli", "train", f"--config={recipe}"]
    for _ in run_process(command, scratch, arguments.device, arguments.deadline_s):
        pass
    summary = json.loads((scratch / "run" / "summary.json").read_text())
    section.add(
        {
            "steps": summary["num_steps"],
            "s_per_step": summary["wall_s"] / summary["num_steps"],
            "generated_tokens_per_s": summary["tokens_generated"] / summary["wall_s"],
            **{f"{name}_s": seconds for name, seconds in sorted(summary["stage_seconds"].items())},
            "critic_hidden_s": summary["critic_overlap_s"],
        }
    )
    section.notes.append("an untrained model of two layers: that the parts work together, not how fast they are")


def _tppo_recipe(scratch: Path, *, on_cpu: bool, num_steps: int) -> Path:
    sys.path.insert(0, str(ROOT / "examples"))
    from characters import write_model_folder, write_rows

    model = scratch / "model"
    write_model_folder(model)
    fields = json.loads((model / "config.json").read_text())
    # Heads as wide as attention kernels for GPUs take them.
    fields |= {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.04}
    (model / "config.json").write_text(json.dumps(fields))
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
    write_rows(scratch / "train.jsonl", rows)
    recipe = {
        "preset": "tppo",
        "run": {"output_dir": str(scratch / "run"), "num_steps": num_steps},
        "policy": {"path": str(model), "init": "random", "dtype": "float32" if on_cpu else "bfloat16"},
        "critic": {"dtype": "float32" if on_cpu else "bfloat16", "warmup_steps": 0},
        "batch": {
            "num_prompts_per_step": 8,
            "num_samples_per_prompt": 4,
            "max_prompt_tokens": 16,
            "max_response_tokens": 48,
            "window_tokens": 16,
            "policy_minibatch_size": 32,
            "critic_minibatch_size": 32,
            "max_tokens_per_microbatch": 2048,
        },
        "data": {"train_files": [str(scratch / "train.jsonl")]},
        "rollout": {
            **({"max_logprob_difference": 1e-3} if on_cpu else {}),
            # NCCL takes one process per GPU: on the trainer's only one the server shares it.
            "placement": "colocated" if not on_cpu and _num_gpus() == 1 else "disaggregated",
            "server_args": {"mem-fraction-static": 0.3},
        },
        "eval": {"every_steps": 0},
    }
    path = scratch / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return path


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


RUNS = {"environment": environment, "parity": parity, "training": training, "weight_sync": weight_sync, "tppo": tppo}


# Report --------------------------------------------------------------------------------------------------------------


def report(sections: Sequence[Section]) -> str:
    parts = ["# GPU validation\n"]
    for section in sections:
        state = "FAILED" if section.failures else "ok"
        parts.append(f"## {section.name}: {state} ({section.seconds:.0f} s)\n")
        parts += [f"- FAILED: {failure}" for failure in section.failures]
        if section.failures:
            parts.append("")
        if section.rows:
            parts.append(_table(section.rows))
        parts += [f"{note}\n" for note in section.notes]
    return "\n".join(parts)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(_cell(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return "unknown"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
