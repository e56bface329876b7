"""`megatron-rl plan`: rank parallel layouts of a run for N GPUs by predicted seconds per finished response."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.errors import ConfigError, UserError
from megatron_rl.system.command_line.terminal import keep_numbers, number_or_word, positive_int, say, split_overrides

if TYPE_CHECKING:
    from megatron_rl.config.schema import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("words", nargs="*", metavar="RECIPE.yaml or key=value", help="recipe or overrides; layout keys that are not given are chosen")
    add("--config", action="append", default=[], help="YAML recipe; may be repeated, later files override earlier ones")
    add("--model", type=Path, metavar="CONFIG", help="folder of the policy, or its config.json (default: policy.path); no weights are read")
    add("--gpus", type=positive_int, required=True, metavar="N", help="number of GPUs for trainer and servers together")
    add("--gpu", default="H100-80G", metavar="NAME", help="GPU type, see docs/planning.md (default: %(default)s)")
    add("--gpu-file", type=Path, metavar="FILE", help="YAML with your own GPU descriptions, in the format of desk/costs/gpus.yaml")
    add("--preset", metavar="NAME", help="preset for the keys that are not given (default without a recipe: tppo)")
    add("--lengths", metavar="LENGTHS", help="response lengths: name:key=value,... or a file or a run's folder (docs/simulate.md)")
    add("--prompts", metavar="LENGTHS", default="fixed:length=200", help="prompt lengths (default: %(default)s)")
    add("--tool-times", metavar="TOKENS:TIMES", help="tokens per turn, and milliseconds of the environment after it (docs/simulate.md)")
    add("--slots", type=positive_int, metavar="N", help="responses per step: prompts x samples")
    add("--sequence-tokens", type=positive_int, metavar="N", help="largest number of tokens of a prompt and its response")
    add("--windows", type=number_or_word, nargs="+", metavar="TOKENS", help="windows to compare (default: the recipe's, half, double)")
    add("--schedules", action="store_true", help="also compare modes, old log-probs, whole responses and slots")
    add("--top", type=positive_int, default=8, metavar="N", help="plans to show (default: %(default)s)")
    add("--choose", type=positive_int, default=1, metavar="N", help="plan to show in full and to write (default: the first)")
    add("--write", type=Path, metavar="FILE.yaml", help="write the chosen plan as a recipe")
    add("--seed", type=positive_int, default=1, help="random seed for sampling response lengths (default: %(default)s)")
    add("--json", action="store_true", help="print the plans as JSON")


def run(arguments: argparse.Namespace) -> int:
    from megatron_rl.config.derived import shares_devices
    from megatron_rl.desk.plan.gpu_splits import splits, splits_near
    from megatron_rl.desk.plan.plan_ranking import PlanRanking, in_order
    from megatron_rl.desk.plan.plan_request import make_plan_request
    from megatron_rl.desk.plan.plan_search import PlanSearch
    from megatron_rl.desk.plan.plan_tables import PlanReport, no_plan_message, print_plans, recipe_text
    from megatron_rl.desk.plan.schedule_comparison import compare_schedules
    from megatron_rl.system.files.atomic_files import write_atomic

    keep_numbers(arguments, "windows")
    recipes = [*arguments.config, *split_overrides(arguments.words)[0]]
    if arguments.write and (arguments.write.is_dir() or arguments.write.resolve() in [Path(path).resolve() for path in recipes]):
        problem = "a folder" if arguments.write.is_dir() else "the given recipe"
        raise UserError(f"--write {arguments.write}: it is {problem}; name a new file")
    request = make_plan_request(arguments)
    search = PlanSearch(request.config, request.facts, request.gpu, request.pinned)
    ranking = PlanRanking(request.config, request.facts["policy"], request.gpu, request.workload, request.windows, arguments.seed)
    bounds = list(ranking.bounds(splits(search, arguments.gpus)))
    if best := next((one for one in in_order(bounds) if not shares_devices(one.rollout)), None):
        bounds += ranking.bounds(splits_near(search, arguments.gpus, best))
    layouts = in_order(bounds)
    plans = ranking.rank(layouts, max(arguments.top, arguments.choose))
    if not plans:
        raise UserError(no_plan_message(search, arguments.gpus, arguments.gpu))
    if arguments.choose > len(plans):
        raise UserError(f"--choose {arguments.choose}: expected a number up to {len(plans)}, the number of plans found")
    chosen = plans[arguments.choose - 1]
    recipe, lengths = str(arguments.write or "RECIPE.yaml"), request.workload.lengths.text
    planned = PlanReport(search, plans, chosen, arguments.gpus, arguments.gpu, lengths, ranking.limit_gpu_s, recipe)
    if arguments.json:
        print(json.dumps([_numbers(one.config) | {"response_s": one.response_s, **asdict(one.outcome)} for one in plans], indent=2))
    else:
        schedules = compare_schedules(ranking, layouts, plans[0], request.given) if arguments.schedules else []
        print_plans(planned, schedules, request.given)
    if arguments.write:
        write_atomic(arguments.write, recipe_text(planned))
        say(f"wrote {arguments.write}")
        _print_missing_keys(chosen.config)
    return 0


def _print_missing_keys(config: "Config") -> None:
    """Print what the recipe still lacks before a dry run accepts it: keys that a plan does not choose."""
    from megatron_rl.config.checks import check_config

    try:
        check_config(config, command="train")
    except ConfigError as error:
        say(f"before it trains, the recipe still needs:\n{error}")


def _numbers(config: "Config") -> dict[str, object]:
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
