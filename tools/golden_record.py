"""A golden record: what the first steps of the examples compute, to the last bit, before and after a change of the code.

    python tools/golden_record.py record before.json --work /tmp/golden_before
    ... change the code ...
    python tools/golden_record.py record after.json --work /tmp/golden_after
    python tools/golden_record.py compare before.json after.json

Every run is made from nothing (task, short warm start, five steps) on one rank with one thread, so that its numbers are a
function of the code alone. Kept are the metrics of every step and a digest of every weight file that a run leaves.
Timings are not kept, nor is ``mismatch/*``: the engine's log-probs depend on which requests shared a batch.
The record belongs to one kind of machine: another processor rounds differently.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
NUM_STEPS = 5
LEFT_OUT = ("mismatch/", "time/")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, dest="command")
    record = commands.add_parser("record")
    record.add_argument("output", type=Path)
    record.add_argument("--work", type=Path, required=True, help="folder for the runs; made anew")
    record.add_argument("--only", nargs="*", choices=sorted(RUNS), default=sorted(RUNS))
    compare = commands.add_parser("compare")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "compare":
        return _compare(json.loads(arguments.before.read_text()), json.loads(arguments.after.read_text()))
    work = arguments.work.resolve()
    work.mkdir(parents=True)
    found = {}
    for name in arguments.only:
        started_s = time.monotonic()
        found |= RUNS[name](work)
        print(f"{name}: {time.monotonic() - started_s:.0f} s", flush=True)
        arguments.output.write_text(json.dumps(found, indent=1, sort_keys=True))
    return 0


def _arithmetic(work: Path) -> dict:
    """The quickstart in both modes, and DAPO from the same start."""
    task, recipe = work / "task", ROOT / "examples/arithmetic/tppo.yaml"
    files = [f"data.train_files=[{task}/train.jsonl]", f"data.eval_files=[{task}/eval.jsonl]"]
    _python("examples/arithmetic/make_task.py", "--output", task)
    _cli("sft", recipe, *files, f"policy.path={task}/model", "policy.init=random", f"sft.train_files=[{task}/sft.jsonl]",
         f"sft.output_path={work}/sft", "sft.num_steps=120", "parallel.num_ranks=1")  # fmt: skip
    _cli("critic-pretrain", recipe, *files, f"policy.path={work}/sft", "critic.path=", f"run.output_dir={work}/critic_run",
         f"critic_pretrain.output_path={work}/critic", "critic_pretrain.num_steps=3", "parallel.num_ranks=1")  # fmt: skip
    found = {"sft": _digests(work / "sft"), "critic": _digests(work / "critic")}
    start = [*files, f"policy.path={work}/sft"]
    for mode in ("tppo", "ppo"):
        recipe = ROOT / f"examples/arithmetic/{mode}.yaml"
        found[mode] = _train(work, mode, [recipe], *start, f"critic.path={work}/critic")
    recipes = ROOT / "examples/recipes"
    found["dapo"] = _train(work, "dapo", [recipes / "arithmetic.yaml", recipes / "dapo.yaml"], *start)
    return found


def _pag(work: Path) -> dict:
    task, recipe = work / "pag_task", ROOT / "examples/pag/pag.yaml"
    files = [f"data.train_files=[{task}/train.jsonl]", f"data.eval_files=[{task}/eval.jsonl]"]
    _python("examples/pag/make_task.py", "--output", task)
    _cli("sft", recipe, *files, f"policy.path={task}/model", "policy.init=random", f"sft.train_files=[{task}/sft.jsonl]",
         f"sft.output_path={work}/pag_sft", "sft.num_steps=60")  # fmt: skip
    return {"pag": _train(work, "pag", [recipe], *files, f"policy.path={work}/pag_sft", "critic.warmup_steps=1")}


def _vision(work: Path) -> dict:
    """The vision example; a rule takes the place of its judge, which would be a model of its own to train first."""
    task, recipe = work / "vision_task", work / "vision.yaml"
    settings = yaml.safe_load((ROOT / "examples/seed_vl_hybrid/seed_vl_hybrid.yaml").read_text())
    settings["reward"]["by_type"]["general"] = settings["reward"]["by_type"]["named"]
    recipe.write_text(yaml.safe_dump(settings))
    files = [f"data.train_files=[{task}/prompts.train.jsonl]", f"data.eval_files=[{task}/prompts.held_out.jsonl]"]
    _python("examples/seed_vl_hybrid/make_task.py", "--output", task)
    _cli("sft", recipe, *files, f"policy.path={task}/model", "policy.init=random", "parallel.num_ranks=1",
         f"sft.train_files=[{task}/prompts.train.jsonl]", f"sft.output_path={work}/vision_sft", "sft.num_steps=40")  # fmt: skip
    start = [*files, f"policy.path={work}/vision_sft", "critic.warmup_steps=1"]
    return {"vision": _train(work, "vision", [recipe], *start)}


RUNS = {"arithmetic": _arithmetic, "pag": _pag, "vision": _vision}


def _train(work: Path, name: str, recipes: list[Path], *overrides: str) -> dict:
    folder = work / name
    _cli("train", *recipes, *overrides, f"run.output_dir={folder}", f"run.num_steps={NUM_STEPS}", "parallel.num_ranks=1",
         "eval.every_steps=5")  # fmt: skip
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {"metrics": [_kept(step) for step in steps], "weights": _digests(folder / "policy")}


def _kept(row: dict, prefix: str = "") -> dict:
    kept = {}
    for name, value in row.items():
        if isinstance(value, dict):
            kept |= _kept(value, f"{prefix}{name}/" if name != "metrics" else "")
        elif not name.startswith(LEFT_OUT) and not name.endswith(("_s", "seconds")):
            kept[prefix + name] = value
    return kept


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors"))}


def _cli(command: str, *arguments: Path | str) -> None:
    words = [f"--config={argument}" if isinstance(argument, Path) else argument for argument in arguments]
    _python("-m", "megatron_rl.cli", command, *words)


def _python(*arguments: Path | str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
        raise SystemExit(f"golden_record: {' '.join(map(str, arguments[:3]))} failed with exit status {done.returncode}")


def _compare(before: dict, after: dict) -> int:
    differences = list(_differences("", before, after))
    for line in differences[:40]:
        print(line)
    count = sum(1 for _ in _leaves(before))
    print(f"{count} values of {len(before)} records compared: {len(differences)} differ")
    return 1 if differences or not count else 0


def _differences(place: str, before: object, after: object):
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            yield from _differences(f"{place}/{key}", before.get(key), after.get(key))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, pair in enumerate(zip(before, after, strict=True)):
            yield from _differences(f"{place}[{index}]", *pair)
    elif before != after:
        yield f"{place}: {before} before, {after} after"


def _leaves(value: object):
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value


if __name__ == "__main__":
    sys.exit(main())
