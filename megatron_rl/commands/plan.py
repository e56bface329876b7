"""`megatron-rl plan`: layouts of a run that fit so many GPUs, ranked by the seconds of a finished response."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from megatron_rl.config.checks import check_config
from megatron_rl.config.schema import Config
from megatron_rl.desk.plan.plan_ranking import PlanRanking
from megatron_rl.desk.plan.plan_request import DEFAULT_PRESET, make_plan_request
from megatron_rl.desk.plan.plan_search import PlanSearch, fewest_gpus, splits
from megatron_rl.desk.plan.plan_tables import PlanReport, no_plan_message, print_plans
from megatron_rl.desk.plan.recipe_writer import recipe_text
from megatron_rl.desk.simulate.length_arguments import DEFAULT_PROMPTS
from megatron_rl.errors import ConfigError, UserError
from megatron_rl.system.command_line.cli_types import positive_int
from megatron_rl.system.command_line.terminal import say
from megatron_rl.system.files.atomic_files import write_atomic


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("words", nargs="*", metavar="RECIPE.yaml or key=value", help="keys; those of the layout are chosen unless a word gives them")
    add("--config", action="append", default=[], help="YAML recipe; a later one overrides")
    add("--model", type=Path, metavar="CONFIG", help="folder of the policy, or its config.json (default: policy.path); no weights are read")
    add("--gpus", type=positive_int, required=True, metavar="N", help="of trainer and servers together")
    add("--gpu", default="H100-80G", metavar="NAME", help="as docs/planning.md lists them (default: %(default)s)")
    add("--gpu-file", type=Path, metavar="FILE", help="YAML with descriptions of your own, in the form of desk/costs/gpus.yaml")
    add("--preset", help=f"megatron-rl presets lists them (default without a recipe: {DEFAULT_PRESET})")
    add("--lengths", metavar="LENGTHS", help="of responses: name:key=value,... or a file or a run's folder (docs/simulate.md)")
    add("--prompts", metavar="LENGTHS", default=DEFAULT_PROMPTS, help="of prompts (default: %(default)s)")
    add("--slots", type=positive_int, metavar="N", help="responses of a step: prompts x samples")
    add("--sequence-tokens", type=positive_int, metavar="N", help="most tokens of a prompt and its response")
    add("--windows", type=positive_int, nargs="+", metavar="TOKENS", help="windows to compare (default: its own, half, twice)")
    add("--top", type=positive_int, default=8, metavar="N", help="plans to show (default: %(default)s)")
    add("--choose", type=positive_int, default=1, metavar="N", help="the plan that is shown in full and written (default: the first)")
    add("--write", type=Path, metavar="FILE.yaml", help="write the chosen plan as a recipe")
    add("--seed", type=positive_int, default=1, help="of the lengths that are drawn")
    add("--json", action="store_true", help="print numbers as JSON")


def run(arguments: argparse.Namespace) -> int:
    inputs = make_plan_request(arguments)
    search = PlanSearch(inputs.config, inputs.facts, inputs.gpu, inputs.pinned)
    ranking = PlanRanking(inputs.config, inputs.facts["policy"], inputs.gpu, inputs.workload, inputs.windows, arguments.seed)
    plans = ranking.best(splits(search, arguments.gpus), max(arguments.top, arguments.choose))
    if not plans:
        raise UserError(no_plan_message(search, arguments.gpus, arguments.gpu, fewest_gpus(search)))
    if arguments.choose > len(plans):
        raise UserError(f"--choose {arguments.choose}: expected one of the {len(plans)} plans that were found")
    chosen = plans[arguments.choose - 1]
    planned = PlanReport(search, plans, chosen, arguments.gpus, arguments.gpu, inputs.workload.lengths.text)
    if arguments.json:
        print(json.dumps([_numbers(one.config) | {"response_s": one.response_s, **asdict(one.outcome)} for one in plans], indent=2))
    else:
        print_plans(planned)
    if arguments.write:
        write_atomic(arguments.write, recipe_text(planned))
        say(f"wrote {arguments.write}")
        _say_what_lacks(chosen.config)
    return 0


def _say_what_lacks(config: Config) -> None:
    """What the dry run would refuse: what a plan does not choose."""
    try:
        check_config(config, command="train")
    except ConfigError as error:
        say(f"before it trains, the recipe still needs:\n{error}")


def _numbers(config: Config) -> dict[str, object]:
    parallel, rollout = asdict(config.parallel), config.rollout
    return {
        "parallel": {name: value for name, value in parallel.items() if name != "collective_timeout_s"},
        "rollout": {
            "placement": rollout.placement.value,
            "tensor_parallel_size": rollout.tensor_parallel_size,
            "num_servers": rollout.num_servers,
        },
        "window_tokens": config.batch.window_tokens,
        "max_tokens_per_microbatch": config.batch.max_tokens_per_microbatch,
        "recompute": config.policy.recompute.value,
        "offload": config.policy.offload.value,
    }
