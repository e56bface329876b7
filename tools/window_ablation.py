"""Simulate the tables of docs/tppo_windows.md: when windows pay off, over windows, tails, slots per server and shares of training.

    python tools/window_ablation.py                              # simulate all cells (about a minute), write figures and tables
    python tools/window_ablation.py --runs SYNC RUN RUN ...      # real runs next to the first run's predictions
    python tools/window_ablation.py --tables                     # only the tables, from the figures

Figures go to docs/pictures/tppo_windows.json, tables between the marks of docs/tppo_windows.md; tools/draw_pictures.py draws.
A policy and a critic of 32B parameters (the paper's size) on servers of eight H100s, by the estimates of docs/estimates.md. All tails have
the same mean, so that only their shape differs.
"""

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from megatron_rl.config.load import load_config
from megatron_rl.config.schedule_facts import Facts, Overlap
from megatron_rl.config.schema import Config, Offload
from megatron_rl.desk.costs.gpus import gpu
from megatron_rl.desk.costs.serving_time import kv_tokens
from megatron_rl.desk.simulate.calibration import calibrated
from megatron_rl.desk.simulate.decoding import ServerLimits
from megatron_rl.desk.simulate.estimated_costs import estimated_timing
from megatron_rl.desk.simulate.lengths import named_lengths
from megatron_rl.desk.simulate.prediction import (
    PredictedMeans,
    StepWork,
    Workload,
    compute_means,
    mean_outcome,
    on_clock,
    predict,
    work_of,
)
from megatron_rl.desk.simulate.recorded_run import prompt_lengths, read_run, response_lengths
from megatron_rl.desk.simulate.scenario import Scenario, make_scenario
from megatron_rl.desk.simulate.simulation_request import observed, replay_fitted, replay_measured
from megatron_rl.desk.simulate.slot_simulation import SlotProcess, trained_rows
from megatron_rl.desk.simulate.timing import Timing
from megatron_rl.families.model_facts import as_config
from megatron_rl.system.files.atomic_files import write_atomic

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "pictures" / "tppo_windows.json"
PAGE = ROOT / "docs" / "tppo_windows.md"

BUDGET, PROMPT_TOKENS, MEAN_TOKENS, NUM_SLOTS = 24576, 300, 4000, 1024
TAILS = {
    "narrow": f"normal:mean={MEAN_TOKENS},std={MEAN_TOKENS // 10},max={BUDGET}",
    "lognormal 0.6": f"lognormal:mean={MEAN_TOKENS},sigma=0.6,max={BUDGET}",
    "lognormal 0.8": f"lognormal:mean={MEAN_TOKENS},sigma=0.8,max={BUDGET}",
    "lognormal 1": f"lognormal:mean={MEAN_TOKENS},sigma=1,max={BUDGET}",
    "10 % at the budget": f"bimodal:short=1513,sigma=0.5,share=0.1,long={BUDGET}",
    "Pareto 1.15": f"pareto:shape=1.15,mean={MEAN_TOKENS},max={BUDGET}",
}
WINDOWS = {"1/12": BUDGET // 12, "1/6": BUDGET // 6, "1/3": BUDGET // 3, "1/2": BUDGET // 2, "1": BUDGET}
SLOTS = (16, 64, 512)
TRAINING = (0.0, 0.25, 0.5, 1.0)
"""Seconds of all trainer stages over those of generation, in the synchronous step."""
PLACES: dict[str, dict[str, Any]] = {
    "apart": {},
    "colocated": {"colocated": True},
    "whole responses": {"training_window_tokens": math.inf},
    "ahead": {"overlap": Overlap.training},
    "ahead, whole responses": {"overlap": Overlap.training, "training_window_tokens": math.inf},
}
"""Name -> facts of the scenario; ahead: schedule.mode=async, compared with sync apart."""
STEPS_THAT_COUNT = 40

MODEL = {  # Qwen2.5-32B
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 5120, "num_hidden_layers": 64,
    "num_attention_heads": 40, "num_key_value_heads": 8, "intermediate_size": 27648, "vocab_size": 152064,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
    "hidden_act": "silu",
}  # fmt: skip
TRAINER = ("old_logprobs", "values", "update_policy", "update_critic")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, nargs="+", metavar="RUN", help="run folders; the first run predicts all of them")
    parser.add_argument("--tables", action="store_true", help="only rewrite the tables")
    arguments = parser.parse_args()
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    if arguments.runs:
        figures["real"] = beside_reality(arguments.runs)
    elif not arguments.tables:
        figures["cells"] = {
            tail: {str(slots): cells(tail, slots) for slots in SLOTS} for tail in TAILS
        }  # fmt: skip
    if not arguments.tables:
        text = json.dumps(figures).replace('{"apart"', '\n{"apart"').replace('{"run"', '\n{"run"')
        write_atomic(FIGURES, text + "\n")
    write_atomic(PAGE, with_tables(PAGE.read_text(), figures))


# The cells.


def scenario(window: int, slots: int, *, overlap: Overlap = Overlap.critic, place: str = "apart") -> Scenario:
    room = int(kv_tokens(as_config(MODEL), gpu("H100-80G"), num_gpus=8, memory_fraction=0.85))
    facts = Facts(**{"overlap": overlap, **PLACES[place]})
    if overlap is Overlap.nothing:
        facts = replace(facts, overlap=overlap)
    return Scenario(
        facts=facts,
        num_trained=NUM_SLOTS,
        num_slots=NUM_SLOTS,
        group_size=16,
        max_response_tokens=BUDGET,
        window_tokens=window,
        jitter_tokens=128 if window < BUDGET else 0,
        num_servers=NUM_SLOTS // slots,
        limits=ServerLimits(kv_tokens=room),
    )


@cache
def costs(slots: int) -> Timing:
    """Costs of 64 trainer GPUs; ``cells`` scales them to the share of training that is looked at."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        config = Config()
        config.policy.path, config.parallel.num_ranks = folder, 64
        config.rollout.num_servers, config.rollout.tensor_parallel_size = NUM_SLOTS // slots, 8
        config.policy.offload = config.critic.offload = Offload.never  # copies would be scaled with the passes
        return estimated_timing(config, gpu("H100-80G"))


def works(tail: str, slots: int, window: int, overlap: Overlap) -> dict[str, list[StepWork]]:
    """Work of each step, by placement; generation is the same in all of them."""
    one = scenario(window, slots, overlap=overlap)
    lengths, prompts = named_lengths(TAILS[tail]), named_lengths(f"fixed:length={PROMPT_TOKENS}")
    process = SlotProcess(one, lengths.draw, prompts.draw, np.random.default_rng(1))
    found: dict[str, list[StepWork]] = {place: [] for place in PLACES}
    for step in range(one.num_settling_steps + STEPS_THAT_COUNT):
        window_of_step = process.generate(step, costs(slots))
        for place in PLACES:
            rows = trained_rows(window_of_step.generated, scenario(window, slots, overlap=overlap, place=place))
            found[place].append(work_of(replace(window_of_step, trained=rows), step))
    return found


def cells(tail: str, slots: int, windows: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Share of training -> place -> window -> numbers; the gain is against sync at the same place."""
    windows = windows or WINDOWS
    base = works(tail, slots, BUDGET, Overlap.nothing)["apart"]
    windowed = {name: works(tail, slots, window, Overlap.critic) for name, window in windows.items()}
    found: dict[str, Any] = {}
    for share in TRAINING:
        timing = with_training(share, base, slots)
        for place in PLACES:
            sync = compute_means(on_clock(scenario(BUDGET, slots, overlap=Overlap.nothing, place=place), base, timing))
            row = {"sync": numbers(sync, sync)}
            for name, window in windows.items():
                one = scenario(window, slots, place=place)
                row[name] = numbers(compute_means(on_clock(one, windowed[name][place], timing)), sync)
            if place != "apart":
                row = {name: {"gain": row[name]["gain"]} for name in windows}
            found.setdefault(f"{share:g}", {})[place] = row
    return found


def with_training(share: float, base: Sequence[StepWork], slots: int) -> Timing:
    """Trainer stages so fast that the synchronous step trains for ``share`` of the seconds for which it generates."""
    timing = costs(slots)
    sync = compute_means(on_clock(scenario(BUDGET, slots, overlap=Overlap.nothing), base, timing))
    factor = share * sync.stage_s["generate"] / sum(sync.stage_s[name] for name in TRAINER)
    scaled = {
        name: replace(
            timing.stage(name), **{part: factor * getattr(timing.stage(name), part) for part in ("token_s", "square_s")}
        )
        for name in TRAINER
    }
    return replace(timing, stages={**timing.stages, **scaled})


def numbers(one: PredictedMeans, sync: PredictedMeans) -> dict[str, float]:
    found = {
        "gain": one.finished_per_s / sync.finished_per_s,
        "step_s": one.step_s,
        "finished_per_s": one.finished_per_s,
        "rollout_idle": one.rollout_idle,
        "trainer_idle": one.trainer_idle,
        "prefix_share": one.prefix_share,
        "unfinished_share": one.unfinished_share,
        "age": one.oldest_age,
    }
    return {name: float(f"{value:.3g}") for name, value in found.items()}


# Real runs.


def beside_reality(folders: Sequence[Path]) -> list[dict[str, Any]]:
    source = read_run(folders[0])
    timing = calibrated(source, make_scenario(load_config(source.folder / "config.yaml")))
    return [compared(folder, timing) for folder in folders]


def compared(folder: Path, timing: Timing) -> dict[str, Any]:
    """A real run, simulated with costs of another one: over its own rows, and over lengths drawn from its own."""
    run = read_run(folder)
    one = make_scenario(load_config(folder / "config.yaml"))
    own = calibrated(run, one)
    real = observed(run, one, timing)
    workload = Workload(response_lengths(run, carries=one.facts.windows), prompt_lengths(run))
    num_steps = len(real.works)
    drawn = mean_outcome(
        [
            compute_means(predict(one, workload, timing, num_steps=num_steps, seed=seed, first=real.first))
            for seed in range(1, 6)
        ]
    )
    measured = compute_means(real)
    found = {
        "steps": measured.num_steps,
        "slots": one.num_slots,
        "real_step_s": measured.step_s,
        "step_s": drawn.step_s,
        "real_finished_per_s": measured.finished_per_s,
        "finished_per_s": drawn.finished_per_s,
        "replay_error": replay_measured(run, one).error,
        "own_costs_error": replay_fitted(run, one, own).error,
        "costs_error": replay_fitted(run, one, timing).error,
        "prefix_share": measured.prefix_share,
        "rollout_idle": measured.rollout_idle,
        "trainer_idle": measured.trainer_idle,
        "drawn_rollout_idle": drawn.rollout_idle,
        "drawn_trainer_idle": drawn.trainer_idle,
    }
    name = f"window {one.window_tokens}" if one.facts.windows else "sync"
    name += ", async" * one.facts.ahead + ", whole responses" * one.facts.whole_responses
    return {"run": name, **{key: float(f"{value:.4g}") for key, value in found.items()}}


# The tables of the page.


def with_tables(page: str, figures: Mapping[str, Any]) -> str:
    """The page with its tables written anew, each between ``<!-- name -->`` and ``<!-- end -->``."""
    for name, table in TABLES.items():
        mark = f"<!-- {name} -->\n"
        if mark in page:
            before, rest = page.split(mark, 1)
            page = f"{before}{mark}{table(figures)}<!-- end -->{rest.split('<!-- end -->', 1)[1]}"
    return page


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def gains(figures: Mapping[str, Any], place: str, share: str) -> str:
    rows = []
    for tail in TAILS:
        for slots in SLOTS:
            row = figures["cells"][tail][str(slots)][share][place]
            rows.append(
                [tail if slots == SLOTS[0] else "", str(slots), *(_bold(row[name]["gain"]) for name in WINDOWS)]
            )
    return _table(["lengths", "slots per server", *(f"W = {name}" for name in WINDOWS)], rows)


def _bold(gain: float) -> str:
    return f"**{gain:.2f}**" if gain >= 2.0 else f"{gain:.2f}"


def inside(figures: Mapping[str, Any]) -> str:
    """Details of one column of the gains: the effect of each window on the step."""
    rows = []
    for tail in ("lognormal 1", "10 % at the budget"):
        row = figures["cells"][tail]["64"]["0.5"]["apart"]
        for name in ("sync", *WINDOWS):
            one = row[name]
            shares = (one[key] for key in ("rollout_idle", "trainer_idle", "prefix_share", "unfinished_share"))
            rows.append(
                [tail if name == "sync" else "", name, f"{one['step_s']:,.0f}", f"{1 / one['finished_per_s']:.3g}"]
                + [f"{share:.0%}" for share in shares]
                + [f"{one['age']:.0f}"]
            )
    head = [
        "lengths",
        "W",
        "step [s]",
        "s per response",
        "rollout idle",
        "trainer idle",
        "prefixes",
        "unfinished",
        "oldest token",
    ]
    return _table(head, rows)


def best(figures: Mapping[str, Any]) -> str:
    """The best window of every tail and share of training."""
    rows = []
    for tail in TAILS:
        for slots in SLOTS:
            cells_ = figures["cells"][tail][str(slots)]
            row = [tail if slots == SLOTS[0] else "", str(slots)]
            for share in map("{:g}".format, TRAINING):
                for place in ("apart", "whole responses"):
                    gain, name = max((cells_[share][place][name]["gain"], name) for name in WINDOWS)
                    row.append(f"{_bold(gain)} ({name})")
            rows.append(row)
    head = [f"{share:g}{' whole' if whole else ''}" for share in TRAINING for whole in (False, True)]
    return _table(["lengths", "slots per server", *head], rows)


def reality(figures: Mapping[str, Any]) -> str:
    rows = []
    for one in figures.get("real", []):
        errors = (one["step_s"] / one["real_step_s"] - 1, one["finished_per_s"] / one["real_finished_per_s"] - 1)
        rows.append(
            [
                one["run"],
                f"{one['steps']:.0f}",
                f"{one['real_step_s']:.3g}",
                f"{one['step_s']:.3g}",
                f"{errors[0]:+.1%}",
            ]
            + [f"{one['real_finished_per_s']:.4g}", f"{one['finished_per_s']:.4g}", f"{errors[1]:+.1%}"]
            + [f"{one[name]:+.1%}" for name in ("costs_error", "own_costs_error", "replay_error")]
        )
    head = ["run", "steps", "real step [s]", "simulated", "error", "real finished/s", "simulated", "error"]
    return _table([*head, "over its own rows", "with its own costs", "with its measured seconds"], rows)


TABLES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "gains": lambda figures: gains(figures, "apart", "0.5"),
    "gains colocated": lambda figures: gains(figures, "colocated", "0.5"),
    "gains whole": lambda figures: gains(figures, "whole responses", "0.5"),
    "gains ahead": lambda figures: gains(figures, "ahead", "0.5"),
    "gains ahead whole": lambda figures: gains(figures, "ahead, whole responses", "0.5"),
    "inside": inside,
    "best": best,
    "reality": reality,
}


if __name__ == "__main__":
    main()
