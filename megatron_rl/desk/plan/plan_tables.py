"""Prints the result of `megatron-rl plan`: the ranked plans, the chosen one in full, and the reasons for refusals."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from megatron_rl.config.derived import num_responses_per_step, server_placement
from megatron_rl.config.layout import SHORT_NAMES, ranks_of_replica
from megatron_rl.config.schema import Config, ParallelConfig
from megatron_rl.desk.costs.parameter_counts import num_parameters
from megatron_rl.desk.costs.run_memory import models_of, run_memory
from megatron_rl.desk.plan.memory_fit import check_fit
from megatron_rl.desk.plan.memory_table import plain_table, print_stages
from megatron_rl.desk.plan.plan_ranking import RankedPlan
from megatron_rl.desk.plan.plan_search import MOST_MACHINES, NO_CACHE, PlanSearch, RefusedLayouts

_GIGA = 1e9
_TIGHT_SHARE = 0.06
"""Less than this share of a GPU to spare is within the error of the estimates."""


@dataclass(frozen=True)
class PlanReport:
    """The inputs and the result of a plan."""

    search: PlanSearch
    plans: Sequence[RankedPlan]
    chosen: RankedPlan
    num_gpus: int
    gpu_name: str
    lengths: str

    @property
    def title(self) -> str:
        """One line that describes the request."""
        config, facts = self.search.config, self.search.facts["policy"]
        return (
            f"{config.policy.path} ({num_parameters(facts) / 1e9:.1f} billion parameters) on {self.num_gpus} {self.gpu_name}; "
            f"{config.schedule.mode.value}, {num_responses_per_step(config):,} slots; responses {self.lengths}"
        )


def print_plans(planned: PlanReport) -> None:
    console = Console()
    console.print(planned.title, soft_wrap=True, highlight=False)
    console.print(_ranking(planned.plans))
    number = 1 + next(index for index, one in enumerate(planned.plans) if one is planned.chosen)
    console.rule(f"plan {number}")
    config, search = planned.chosen.config, planned.search
    for line in _lines(planned):
        console.print(line, soft_wrap=True, highlight=False)
    console.print()
    models = models_of(config, search.facts)
    print_stages(console, run_memory(config, models), models)
    if search.refused:
        console.rule("refused (a plan leaves 4 % of a GPU free)")
        console.print(_refusals(search))
    console.print("seconds are estimates: docs/estimates.md", soft_wrap=True)
    console.print(f"to start plan {number}: {start_command(planned, 'RECIPE.yaml')}", soft_wrap=True, highlight=False)


def layout_text(parallel: ParallelConfig) -> str:
    """Return the sizes above 1 by their short names, including data parallelism."""
    sizes = {short: getattr(parallel, name) for short, name in SHORT_NAMES.items()}
    if parallel.expert_parallel_size == 1:
        sizes.pop("etp")
    sizes["dp"] = parallel.num_ranks // ranks_of_replica(parallel)
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1 or (name == "etp" and size)) or "dp1"


def start_command(planned: PlanReport, recipe: str) -> str:
    """Return the command that starts the chosen plan, on one node or under SLURM."""
    config, per_machine = planned.chosen.config, planned.search.gpu.per_machine
    if planned.num_gpus <= per_machine:
        return f"megatron-rl train --config {recipe}"
    machines = planned.num_gpus // per_machine
    words = f"sbatch --nodes {machines} launch/slurm.sbatch train --config {recipe}"
    if server_placement(config.rollout).shares_devices:
        return f"{words} rollout.urls=[...], with servers on each of the machines (docs/weight_sync.md)"
    several = config.rollout.tensor_parallel_size // per_machine
    nodes = f"ROLLOUT_NODES={machines - config.parallel.num_ranks // per_machine}"
    return " ".join([nodes, *([f"SERVER_NODES={several}"] if several > 1 else []), words])


def no_plan_message(search: PlanSearch, num_gpus: int, gpu_name: str, fewest: int) -> str:
    """Return the reasons why there is no plan, with remedies."""
    facts = search.facts["policy"]
    size = f"{num_parameters(facts) / 1e9:.1f} billion parameters"
    lines = [f"{search.config.policy.path}: nothing that trains its {size} fits {num_gpus} {gpu_name}"]
    lines += [f"  {number:,} layouts: {reason}{f'; nearest: {miss}' if miss else ''}" for reason, number, miss in _reasons(search)]
    if fewest:
        lines.append(f"the fewest {gpu_name} that something fits: {fewest}")
    elif NO_CACHE in search.refused:
        why = f"a server is spread over {MOST_MACHINES} machines of {search.gpu.per_machine} at most"
        lines.append(f"no number of {gpu_name} is enough: {why}; take GPUs with more memory")
    else:
        lines.append("no number of them up to 4,096 is enough; take shorter responses (--sequence-tokens) or GPUs with more memory")
    if search.pinned:
        lines.append(f"with {', '.join(sorted(search.pinned))} as given")
    return "\n".join(lines)


def _ranking(plans: Sequence[RankedPlan]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("plan", justify="right", no_wrap=True)
    table.add_column("s a\nresponse", justify="right", no_wrap=True)
    table.add_column("s a\nstep", justify="right", no_wrap=True)
    for column in ("trainer", "servers"):
        table.add_column(column, overflow="fold")
    table.add_column("window", justify="right", no_wrap=True)
    table.add_column("recom-\npute", no_wrap=True)
    table.add_column("what binds", overflow="fold")
    for number, one in enumerate(plans, 1):
        config = one.config
        trainer, window = f"{config.parallel.num_ranks}: {layout_text(config.parallel)}", config.batch.window_tokens
        seconds = (f"{one.response_s:.3g}", f"{one.outcome.step_s:.4g}")
        recompute = {"selective": "some"}.get(config.policy.recompute.value, config.policy.recompute.value)
        table.add_row(str(number), *seconds, trainer, _servers(config), f"{window:,}" if window else "-", recompute, one.bottleneck)
    return table


def _servers(config: Config) -> str:
    size = config.rollout.tensor_parallel_size
    text = f"{config.rollout.num_servers} x {'tp' + str(size) if size > 1 else '1 GPU'}"
    return f"{text}, in turns" if server_placement(config.rollout).shares_devices else text


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
    yield "a step: " + ", ".join(f"{name} {seconds:.3g} s" for name, seconds in stages if seconds > 0.01 * outcome.step_s)
    yield f"binds: {planned.chosen.bottleneck}"
    found = check_fit(config, search.facts, search.gpu)
    spare = search.gpu.hbm_bytes - found.needed
    word = "tightly, " if spare < _TIGHT_SHARE * search.gpu.hbm_bytes else ""
    taken = f"{found.needed / _GIGA:.1f} of {search.gpu.hbm_bytes / _GIGA:.0f} GB"
    yield f"memory: {found.stage} takes {taken}, {word}{spare / _GIGA:.1f} GB free"
    yield f"a server's KV cache: {int(found.kv_tokens // search.longest)} responses of {search.longest:,} tokens at once"


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
        return f"a server of {refused.nearest.rollout.tensor_parallel_size} GPUs lacks {refused.excess / _GIGA:.1f} GB on each"
    parallel = refused.nearest.parallel
    return f"{parallel.num_ranks}: {layout_text(parallel)}, {refused.excess / _GIGA:.2g} GB too many"
