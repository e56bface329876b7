"""A golden record: what the first steps of the examples compute, to the last bit, before and after a change of the code.

    python tools/golden_record.py record before.json --work /tmp/golden_before
    ... change the code ...
    python tools/golden_record.py record after.json --work /tmp/golden_after
    python tools/golden_record.py compare before.json after.json

Every run is made from nothing (task, short warm start, five steps) on one rank with one thread, so that its numbers are a
function of the code alone. Kept are the metrics of every step and a digest of every weight file that a run leaves.
Times and memory are measured: of these metrics only the names are kept. ``mismatch/*`` is rounded to four decimals: it comes
from the engine's log-probs, and their last bits depend on which requests shared a batch. That was seen with experts only.
The runs ``async`` and ``in_flight`` weigh tokens by these log-probs: were the bits to change there, weights would, too.

Of the run ``in_flight`` most is kept by name only: where a publish meets a window depends on the clock, and so do tokens,
weights and whatever follows from them. Kept are all values up to step 1, whose window no publish can meet, and those values
of later steps that the recipe alone decides. Few requests at a time make windows long enough for a publish to meet them;
that one did is in the run's metrics (``rollout/staleness_mean`` between 0 and 1), not in the record.

The tool uses the command line, config keys and files alone, so the code under it may move.
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
RECIPES = ROOT / "examples/recipes"
NUM_STEPS = 5
NOT_KEPT = "not kept"
"""Stands in the record for a value of which only the name is compared."""
NAME_ONLY = ("time/", "memory/")
ROUNDED = "mismatch/"
STEADY = (
    "step", "rollout/num_slots", "rollout/num_live_servers", "rollout/num_server_restarts", "reward/num_unscored",
    "reward/error_rate", "policy/lr", "policy/num_updates", "policy/num_skipped", "critic/lr", "critic/num_skipped",
    "sync/version", "sync/bytes", "sync/buffer_bytes", "checkpoint/num_failed", "health/num_rollbacks",
)  # fmt: skip
"""Metrics of a run in flight that the clock cannot change."""
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
"""Additional fields in config.json of the arithmetic task's model if its layers have experts."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, dest="command")
    record = commands.add_parser("record")
    record.add_argument("output", type=Path)
    record.add_argument("--work", type=Path, required=True, help="folder for the runs; replaced if it exists")
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
    """The quickstart in both modes; from the same start DAPO, windows generated ahead, and the server on the trainer's devices."""
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
    found["dapo"] = _train(work, "dapo", _recipes("dapo"), *start)
    start.append(f"critic.path={work}/critic")
    found["async"] = _train(work, "async", _recipes("tppo_async"), *start)
    found["in_flight"] = _steady(_train(work, "in_flight", _recipes("tppo_async"), *start, "schedule.weight_update=in_flight",
                                        "rollout.max_inflight_requests=8"))  # fmt: skip
    found["colocated"] = _train(work, "colocated", _recipes("tppo"), *start, "rollout.placement=colocated",
                                "policy.offload=always", "critic.offload=always")  # fmt: skip
    return found


def _experts(work: Path) -> dict:
    """The arithmetic task for a policy with routed experts, in both kinds of routing replay."""
    task, recipe = work / "experts_task", ROOT / "examples/arithmetic/tppo.yaml"
    files = [f"data.train_files=[{task}/train.jsonl]", f"data.eval_files=[{task}/eval.jsonl]"]
    _python("examples/arithmetic/make_task.py", "--output", task)
    config = task / "model/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | EXPERTS))
    _cli("sft", recipe, *files, f"policy.path={task}/model", "policy.init=random", f"sft.train_files=[{task}/sft.jsonl]",
         f"sft.output_path={work}/experts_sft", "sft.num_steps=60", "parallel.num_ranks=1")  # fmt: skip
    start = [*files, f"policy.path={work}/experts_sft", "batch.num_prompts_per_step=16", "batch.policy_minibatch_size=32",
             "policy.moe.load_balancing=aux_loss", "policy.moe.aux_loss_coef=0.01"]  # fmt: skip
    windows = ["policy.moe.routing_replay=R3", "critic.path=", "critic.warmup_steps=1"]
    return {
        "experts_sft": _digests(work / "experts_sft"),
        "experts_tppo": _train(work, "experts_tppo", _recipes("tppo"), *start, *windows),
        "experts_grpo": _train(work, "experts_grpo", _recipes("grpo"), *start, "policy.moe.routing_replay=R2"),
    }


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


RUNS = {"arithmetic": _arithmetic, "experts": _experts, "pag": _pag, "vision": _vision}


def _recipes(name: str) -> list[Path]:
    return [RECIPES / "arithmetic.yaml", RECIPES / f"{name}.yaml"]


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
        elif name.startswith(NAME_ONLY) or name.endswith(("_s", "seconds")):
            kept[prefix + name] = NOT_KEPT
        else:
            kept[prefix + name] = round(value, 4) if name.startswith(ROUNDED) else value
    return kept


def _steady(found: dict) -> dict:
    """The reproducible part of an in-flight run: all names, the values up to step 1, steady values after it, the weight files."""
    rows = [
        row if row["step"] <= 1 else {name: value if name in STEADY else NOT_KEPT for name, value in row.items()}
        for row in found["metrics"]
    ]
    return {"metrics": rows, "weights": dict.fromkeys(found["weights"], NOT_KEPT)}


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
    leaves = list(_leaves(before))
    count = len(leaves) - leaves.count(NOT_KEPT)
    print(f"{count} values and {leaves.count(NOT_KEPT)} names of {len(before)} records compared: {len(differences)} differ")
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
