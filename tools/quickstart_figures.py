"""Keeps the quickstart's published figures in one file, docs/quickstart.json, and writes them into the pages that show them.

    .venv/bin/python tools/quickstart_figures.py --run     # runs the quickstart; this machine, load and commit become the published ones
    .venv/bin/python tools/quickstart_figures.py           # the pages again, from the file; a test compares them

A page has the figures between ``<!-- quickstart NAME -->`` and ``<!-- end -->``.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any

from megatron_rl.system.files.atomic_files import write_atomic

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "docs" / "quickstart.json"
SHOWN_STEPS = (1, 20, 110)
"""Training steps of the transcript."""
SHOWN = re.compile(
    r"== [2-4]/4|sft step \d+/\d+ .*|before training:|accuracy on held-out|wall-clock time  |critic update|quickstart: done"
)
"""Other lines of the transcript. Of lines that differ in numbers only, the last one is shown."""
SHORTER = ((r"\((generate [\d.]+), .*", r"(\1, ...)"), (r" ± [\d.]+%", ""), (r" \(\d+ s since the start\)", ""))
KEPT = ("processor", "vectors", "note", "date", "commit", "before", "after", "seconds")
"""What is kept of a run that is no longer the published one."""
VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2"}

Figures = Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--run", action="store_true", help="run launch/quickstart.sh here and publish its figures")
    if parser.parse_args().run:
        measured = {**machine(), **read_log(quickstart())}
        write_atomic(SOURCE, json.dumps(published(load(), measured), indent=1, ensure_ascii=False) + "\n")
    for page, text in pages(load()).items():
        write_atomic(page, text)


def quickstart(command: Sequence[str] = ("bash", "launch/quickstart.sh")) -> str:
    """The output of the quickstart, which is also shown as it comes. Raises CalledProcessError if it fails."""
    lines = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, list(command))
    return "".join(lines)


def published(figures: Figures, measured: Figures) -> Figures:
    """``figures`` with a new published run; the last run of every other processor goes to ``elsewhere``."""
    kind = itemgetter("processor", "vectors")
    others = {kind(run): run for run in (figures["published"], *figures["elsewhere"]) if kind(run) != kind(measured)}
    return {"published": measured, "elsewhere": [{key: run[key] for key in KEPT if key in run} for run in others.values()]}


def load() -> Figures:
    """The published run, and the figures of runs on other machines."""
    figures: Figures = json.loads(SOURCE.read_text())
    return figures


def machine() -> Figures:
    """Processor, vector instructions, load, versions, date and commit of this moment."""
    processor = Path("/proc/cpuinfo").read_text()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    flags = re.findall(r"\w+", processor.partition("flags")[2].partition("\n")[0])
    return {
        "processor": re.findall(r"model name\s*: (.*)", processor)[0],
        "vectors": next((name for flag, name in VECTORS.items() if flag in flags), "SSE"),
        "note": f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the start",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit.stdout.strip(),
        "versions": {name: version(name) for name in ("torch", "megatron-core", "sglang", "numpy")},
    }


def read_log(log: str) -> Figures:
    """The transcript's lines and the accuracies in them, in percent."""
    shown: dict[str, str] = {}
    for line in log.splitlines():
        step = re.match(r"step (\d+)/", line)
        if (step and int(step[1]) in SHOWN_STEPS) or SHOWN.match(line):
            kind = step[1] if step else re.sub(r"[\d.,]+", "", line)
            shown.pop(kind, None)  # a later line of a kind stands where it came
            shown[kind] = line
    lines = list(shown.values())
    for pattern, short in SHORTER:
        lines = [re.sub(pattern, short, line).rstrip() for line in lines]
    before, after = re.findall(r"accuracy on held-out prompts +([\d.]+)% before, ([\d.]+)% after", "\n".join(lines))[-1]
    seconds = re.findall(r"(?m)^quickstart: done in (\d+) s$", log)[-1]
    return {"before": before, "after": after, "seconds": seconds, "transcript": lines}


def transcript(figures: Figures) -> str:
    run = figures["published"]
    where = f"{run['processor']}, {run['vectors']}, {run['note']}, {run['date']}, commit {run['commit']}"
    return "\n".join(
        [
            "```text",
            *run["transcript"],
            "```",
            "",
            f"({where}; lines and stage times shortened.",
            "`accuracy` is that of sampled responses that finished in the step, `eval` the greedy one on 500 held-out problems. [Other",
            "processors](docs/benchmarks.md#how-far-reproducible-goes) give other figures.)",
        ]
    )


def processors(figures: Figures) -> str:
    """A table with one row per machine that ran the quickstart."""
    rows = ["| processor | vector instructions | date, commit, load | seconds | accuracy before and after |", "|---|---|---|---|---|"]
    for run in (figures["published"], *figures["elsewhere"]):
        when = ", ".join(run[key] for key in ("date", "commit", "note") if run.get(key))
        rows.append(f"| {run['processor']} | {run['vectors']} | {when} | {run['seconds']} | {run['before']} %, {run['after']} % |")
    return "\n".join(rows)


BLOCKS: dict[Path, dict[str, Callable[[Figures], str]]] = {
    ROOT / "README.md": {"transcript": transcript},
    ROOT / "docs" / "benchmarks.md": {"processors": processors},
}


def pages(figures: Figures) -> dict[Path, str]:
    """Every page with its blocks written anew."""
    return {page: _replaced(page.read_text(), blocks, figures) for page, blocks in BLOCKS.items()}


def _replaced(text: str, blocks: Mapping[str, Callable[[Figures], str]], figures: Figures) -> str:
    for name, block in blocks.items():
        begin, end = f"<!-- quickstart {name} -->\n\n", "\n\n<!-- end -->"
        before, found, rest = text.partition(begin)
        assert found and end in rest, f"no block {begin.strip()}"
        text = before + begin + block(figures) + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    main()
