"""Prints the result of `megatron-rl plan`, and writes the chosen plan as a recipe.

The output is the ranked plans, the chosen one in full, and the reasons for refusals. The recipe has the keys that differ from its
preset and the schema's defaults.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from megatron_rl.config.derived import num_responses_per_step, shares_devices
from megatron_rl.config.layout import SHORT_NAMES, ranks_of_replica
from megatron_rl.config.load import load_config, to_yaml_values
from megatron_rl.config.schema import Config, ParallelConfig
from megatron_rl.desk.costs.parameter_counts import num_parameters
from megatron_rl.desk.costs.run_memory import models_of
from megatron_rl.desk.plan.gpu_splits import MOST_MACHINES, fewest_gpus, not_looked_at, ways_out
from megatron_rl.desk.plan.memory_fit import check_fit
from megatron_rl.desk.plan.memory_table import plain_table, print_stages
from megatron_rl.desk.plan.plan_ranking import RankedPlan
from megatron_rl.desk.plan.plan_search import NO_CACHE, PlanSearch, RefusedLayouts
from megatron_rl.desk.plan.schedule_comparison import MODE, OLD_POLICY, SLOTS, TRAINS_ON, ComparedSchedule

_GIGA = 1e9
_TIGHT_SHARE = 0.06
"""Share of a GPU; less free memory is within the error of the estimates."""


@dataclass(frozen=True)
class PlanReport:
    """The inputs and the result of a plan."""

    search: PlanSearch
    plans: Sequence[RankedPlan]
    chosen: RankedPlan
    num_gpus: int
    gpu_name: str
    lengths: str
    limit_gpu_s: float
    """The least GPU-seconds of a response."""
    recipe: str
    """Name of the recipe in the command that starts the plan."""

    @property
    def title(self) -> str:
        """One line that describes the request."""
        config, facts = self.search.config, self.search.facts["policy"]
        return (
            f"{config.policy.path} ({num_parameters(facts) / 1e9:.1f} billion parameters) on {self.num_gpus} {self.gpu_name}; "
            f"{config.schedule.mode.value}, {num_responses_per_step(config):,} slots; responses {self.lengths}"
        )


def print_plans(planned: PlanReport, schedules: Sequence[ComparedSchedule] = (), given: Collection[str] = ()) -> None:
    """Print the plans, the chosen plan in full and the compared schedules; keys ``given`` by the user were not changed."""
    console = Console()
    console.print(planned.title, soft_wrap=True, highlight=False)
    console.print(_ranking(planned))
    number = 1 + next(index for index, one in enumerate(planned.plans) if one is planned.chosen)
    console.rule(f"plan {number}")
    config, search = planned.chosen.config, planned.search
    for line in _lines(planned):
        console.print(line, soft_wrap=True, highlight=False)
    console.print()
    models = models_of(config, search.facts)
    print_stages(console, config, models, search.gpu.hbm_bytes)
    if search.refused:
        console.rule("refused (a plan leaves 4 % of a GPU free)")
        console.print(_refusals(search))
    if schedules:
        console.rule("other schedules: the fastest plan with these keys")
        for line in _schedule_lines(planned, schedules):
            console.print(line, soft_wrap=True, highlight=False)
    console.print(f"not looked at: {_left_out(planned, schedules, given)}", soft_wrap=True, highlight=False)
    console.print("seconds are estimates: docs/estimates.md", soft_wrap=True)
    console.print(f"to start plan {number}: {start_command(planned)}", soft_wrap=True, highlight=False)


def layout_text(parallel: ParallelConfig) -> str:
    """Return the sizes above 1 by their short names, including data parallelism."""
    sizes = {short: getattr(parallel, name) for short, name in SHORT_NAMES.items()}
    if parallel.expert_parallel_size == 1:
        sizes.pop("etp")
    sizes["dp"] = parallel.num_ranks // ranks_of_replica(parallel)
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1 or (name == "etp" and size)) or "dp1"


def start_command(planned: PlanReport) -> str:
    """Return the command that starts the chosen plan, on one node or under SLURM."""
    config, per_machine = planned.chosen.config, planned.search.gpu.per_machine
    if planned.num_gpus <= per_machine:
        return f"megatron-rl train --config {planned.recipe}"
    machines, size, num_ranks = planned.num_gpus // per_machine, config.rollout.tensor_parallel_size, config.parallel.num_ranks
    command = f"sbatch --nodes {machines} launch/slurm.sbatch train --config {planned.recipe}"
    shared = shares_devices(config.rollout)
    servers = 0 if shared else -(-config.rollout.num_servers * size // (per_machine - per_machine % min(size, per_machine)))
    trainers = machines - servers if num_ranks % (machines - servers) == 0 else -(-num_ranks // per_machine)
    variables: dict[str, int | str] = {
        "ROLLOUT_NODES": "all" if shared else servers,
        "SERVER_NODES": size // per_machine if size > per_machine else 0,
        # Pinned sizes may leave GPUs of each node idle.
        "RANKS_PER_NODE": num_ranks // trainers if num_ranks < trainers * per_machine else 0,
    }
    return " ".join([*(f"{name}={number}" for name, number in variables.items() if number), command])


def no_plan_message(search: PlanSearch, num_gpus: int, gpu_name: str) -> str:
    """Return the reasons why there is no plan, with the changes that help."""
    facts = search.facts["policy"]
    size = f"{num_parameters(facts) / 1e9:.1f} billion parameters"
    lines = [f"{search.config.policy.path}: no layout that trains its {size} fits {num_gpus} {gpu_name}"]
    lines += [f"  {number:,} layouts: {reason}{f'; nearest: {miss}' if miss else ''}" for reason, number, miss in _reasons(search)]
    fewest = fewest_gpus(search)
    if fewest:
        lines.append(f"the smallest number of {gpu_name} with a layout that fits: {fewest}")
    elif NO_CACHE in search.refused:
        why = f"a server spans at most {MOST_MACHINES} nodes of {search.gpu.per_machine}"
        lines.append(f"no number of {gpu_name} is enough: {why}; use GPUs with more memory")
    else:
        lines.append(f"no layout that the dry run accepts fits any number of {gpu_name} up to 4,096")
    lines += [f"{num_gpus} {gpu_name} are enough with: {way}" for way in ways_out(search, num_gpus)]
    if search.pinned:
        lines.append(f"these keys were given and not searched: {', '.join(sorted(search.pinned))}")
    return "\n".join([*lines, f"not looked at: {', '.join(not_looked_at(search))}"])


def _schedule_lines(planned: PlanReport, schedules: Sequence[ComparedSchedule]) -> Iterator[str]:
    yield "s per response, times the limit, age of the oldest token"
    for one in (ComparedSchedule("as given", planned.plans[0]), *schedules):
        config, window = one.plan.config, one.plan.config.batch.window_tokens
        place = f"rollout.placement={config.rollout.placement.value} batch.window_tokens={window}"
        seconds, age = f"{one.plan.response_s:8.3g}", f"{one.plan.outcome.oldest_age:2} steps"
        yield f"{seconds} {_multiple(planned, one.plan):>5} {age}  {one.text} {place}"


def _left_out(planned: PlanReport, schedules: Sequence[ComparedSchedule], given: Collection[str]) -> str:
    """Values of keys that no plan has."""
    if not schedules:
        others = f"other values of {OLD_POLICY}, {TRAINS_ON} and slots (--schedules compares them)"
        return ", ".join([*not_looked_at(planned.search), others])
    missing = not_looked_at(planned.search, None if MODE in given else [])
    fixed = [f"other values of {key}" for key in (OLD_POLICY, TRAINS_ON, SLOTS) if key in given]
    return ", ".join([*missing, *fixed, "windows of training between one window and whole responses"])


def _multiple(planned: PlanReport, one: RankedPlan) -> str:
    """GPU-seconds per response over the least that they can be."""
    return f"{one.response_s * planned.num_gpus / planned.limit_gpu_s:.2f}" if planned.limit_gpu_s else "-"


def _ranking(planned: PlanReport) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("plan", justify="right", no_wrap=True)
    table.add_column("s per\nresponse", justify="right", no_wrap=True)
    table.add_column("s per\nstep", justify="right", no_wrap=True)
    for column in ("trainer", "servers"):
        table.add_column(column, overflow="fold")
    table.add_column("window", justify="right", no_wrap=True)
    table.add_column("recom-\npute", no_wrap=True)
    table.add_column("bottleneck", overflow="fold")
    table.add_column("x\nlimit", justify="right", no_wrap=True)
    for number, one in enumerate(planned.plans, 1):
        config = one.config
        trainer, window = f"{config.parallel.num_ranks}: {layout_text(config.parallel)}", config.batch.window_tokens
        seconds = (f"{one.response_s:.3g}", f"{one.outcome.step_s:.4g}")
        recompute = {"selective": "some"}.get(config.policy.recompute.value, config.policy.recompute.value)
        cells = (trainer, _servers(config), f"{window:,}" if window else "-", recompute, one.bottleneck, _multiple(planned, one))
        table.add_row(str(number), *seconds, *cells)
    return table


def _servers(config: Config) -> str:
    size = config.rollout.tensor_parallel_size
    text = f"{config.rollout.num_servers} x {'tp' + str(size) if size > 1 else '1 GPU'}"
    return f"{text}, colocated" if shares_devices(config.rollout) else text


def _lines(planned: PlanReport) -> Iterator[str]:
    """Yield the chosen plan's keys, its memory use and its bottleneck."""
    config, search = planned.chosen.config, planned.search
    parallel, rollout = config.parallel, config.rollout
    sizes = {name: getattr(parallel, name) for name in ("num_ranks", *SHORT_NAMES.values(), "sequence_parallel", "pipeline_layers")}
    words = [f"parallel.{name}={str(size).lower().replace(' ', '')}" for name, size in sizes.items() if size not in (1, 0, False, [])]
    words += [f"policy.recompute={config.policy.recompute.value}", f"policy.offload={config.policy.offload.value}"]
    words += [f"batch.{name}={getattr(config.batch, name)}" for name in ("window_tokens", "max_tokens_per_microbatch")]
    words += [f"rollout.placement={rollout.placement.value}", f"rollout.num_servers={rollout.num_servers}"]
    words += [f"rollout.tensor_parallel_size={rollout.tensor_parallel_size}"]
    words += [f"rollout.server_args.{name}={value}" for name, value in rollout.server_args.items()]
    yield " ".join(words)
    outcome = planned.chosen.outcome
    stages = sorted(outcome.stage_s.items(), key=lambda item: -item[1])
    yield "step: " + ", ".join(f"{name} {seconds:.3g} s" for name, seconds in stages if seconds > 0.01 * outcome.step_s)
    yield f"bottleneck: {planned.chosen.bottleneck}"
    spent = f"{planned.chosen.response_s * planned.num_gpus:.3g} GPU-s per response"
    yield f"cost: {spent}, {_multiple(planned, planned.chosen)} times the limit of {planned.limit_gpu_s:.3g}"
    yield _run_cost(planned)
    found = check_fit(config, search.facts, search.gpu)
    spare = search.gpu.hbm_bytes - found.needed
    word = "tightly, " if spare < _TIGHT_SHARE * search.gpu.hbm_bytes else ""
    taken = f"{found.needed / _GIGA:.1f} of {search.gpu.hbm_bytes / _GIGA:.0f} GB"
    yield f"memory: {found.stage} needs {taken}, {word}{spare / _GIGA:.1f} GB free"
    yield f"a server's KV cache: {int(found.kv_tokens // search.longest)} responses of {search.longest:,} tokens at a time"


def _run_cost(planned: PlanReport) -> str:
    num_steps = planned.chosen.config.run.num_steps
    hours = num_steps * planned.chosen.outcome.step_s / 3600
    return f"{num_steps:,} steps: {hours / 24:,.3g} days, {hours * planned.num_gpus:,.0f} GPU-hours"


def _refusals(search: PlanSearch) -> Table:
    table = plain_table("layouts", "reason", "nearest miss", texts=("reason", "nearest miss"))
    for column in table.columns[1:]:
        column.no_wrap, column.overflow = False, "fold"
    table.columns[0].justify = "right"
    for reason, number, miss in _reasons(search):
        table.add_row(f"{number:,}", reason, miss)
    return table


def _reasons(search: PlanSearch) -> Iterator[tuple[str, int, str]]:
    """Yield (reason, number of layouts, nearest miss), memory reasons first."""
    for reason, refused in sorted(search.refused.items(), key=lambda item: (item[1].excess == math.inf, -item[1].number)):
        yield reason, refused.number, _miss(reason, refused)


def _miss(reason: str, refused: RefusedLayouts) -> str:
    if refused.nearest is None or refused.excess == math.inf:
        return ""
    if reason == NO_CACHE:
        return f"a server of {refused.nearest.rollout.tensor_parallel_size} GPUs lacks {refused.excess / _GIGA:.1f} GB per GPU"
    parallel = refused.nearest.parallel
    return f"{parallel.num_ranks}: {layout_text(parallel)}, {refused.excess / _GIGA:.2g} GB too much"


def recipe_text(planned: PlanReport) -> str:
    """Return YAML that ``load_config`` reads back to the chosen plan's configuration.

    Comments at its top have the prediction and the start command.
    """
    config, one = planned.chosen.config, planned.chosen
    head = [
        f"By `megatron-rl plan`: {planned.title}.",
        f"Predicted: {one.response_s:.3g} s per finished response, {one.outcome.step_s:.4g} s per step; bottleneck: {one.bottleneck}.",
        f"{_run_cost(planned)}. Estimates of one simulation; the plan has not been run.",
        f"start: {start_command(planned)}",
    ]
    base = to_yaml_values(load_config(None, [f"preset={config.preset}"] if config.preset else []))
    values = {"preset": config.preset} if config.preset else {}
    values |= {name: part for name, part in _beyond(to_yaml_values(config), base).items() if name != "preset"}
    return "".join(f"# {line}\n" for line in head) + yaml.safe_dump(values, sort_keys=False, width=120)


def _beyond(values: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        if name in base and base[name] == value:
            continue
        found[name] = _beyond(value, base[name]) if isinstance(value, dict) and isinstance(base.get(name), dict) else value
    return found
