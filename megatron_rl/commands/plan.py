"""`megatron-rl plan`: rank parallel layouts of a run for N GPUs by predicted seconds per finished response."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron_rl.config.checks import check_config
from megatron_rl.config.load import load_config
from megatron_rl.config.schema import Config, Mode
from megatron_rl.desk.costs.gpus import Gpu, gpu
from megatron_rl.desk.costs.parameter_counts import num_parameters
from megatron_rl.desk.costs.run_memory import model_folders
from megatron_rl.desk.plan.plan_ranking import PlanRanking
from megatron_rl.desk.plan.plan_search import CHOSEN, PlanSearch, fewest_gpus, splits
from megatron_rl.desk.plan.plan_tables import PlanReport, no_plan_message, print_plans
from megatron_rl.desk.plan.recipe_writer import recipe_text
from megatron_rl.desk.simulate.length_arguments import DEFAULT_PROMPTS, parse_lengths
from megatron_rl.desk.simulate.lengths import named_lengths
from megatron_rl.desk.simulate.prediction import Workload
from megatron_rl.errors import ConfigError, UserError
from megatron_rl.families.family import ModelConfig, families
from megatron_rl.families.flops import flops_cost
from megatron_rl.families.model_facts import as_config, is_supported, read_model_json
from megatron_rl.system.command_line.cli_types import positive_int, split_overrides
from megatron_rl.system.command_line.terminal import say
from megatron_rl.system.files.atomic_files import write_atomic

_DEFAULT_PRESET = "tppo"
_WITHOUT_RECIPE = ("policy.dtype=bfloat16", "rollout.start_timeout_s=1800", "data.train_files=[data/train.jsonl]")
"""Keys that a recipe on GPUs usually sets, used without a recipe; a user's recipe is not changed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("words", nargs="*", metavar="RECIPE.yaml or key=value", help="recipe or overrides; layout keys that are not given are chosen")
    add("--config", action="append", default=[], help="YAML recipe; may be repeated, later files override earlier ones")
    add("--model", type=Path, metavar="CONFIG", help="folder of the policy, or its config.json (default: policy.path); no weights are read")
    add("--gpus", type=positive_int, required=True, metavar="N", help="number of GPUs for trainer and servers together")
    add("--gpu", default="H100-80G", metavar="NAME", help="GPU type, see docs/planning.md (default: %(default)s)")
    add("--gpu-file", type=Path, metavar="FILE", help="YAML with your own GPU descriptions, in the format of desk/costs/gpus.yaml")
    add("--preset", help=f"preset, see megatron-rl presets (default without a recipe: {_DEFAULT_PRESET})")
    add("--lengths", metavar="LENGTHS", help="response lengths: name:key=value,... or a file or a run's folder (docs/simulate.md)")
    add("--prompts", metavar="LENGTHS", default=DEFAULT_PROMPTS, help="prompt lengths (default: %(default)s)")
    add("--slots", type=positive_int, metavar="N", help="responses per step: prompts x samples")
    add("--sequence-tokens", type=positive_int, metavar="N", help="largest number of tokens of a prompt and its response")
    add("--windows", type=positive_int, nargs="+", metavar="TOKENS", help="windows to compare (default: the recipe's, its half and double)")
    add("--top", type=positive_int, default=8, metavar="N", help="plans to show (default: %(default)s)")
    add("--choose", type=positive_int, default=1, metavar="N", help="plan to show in full and to write (default: the first)")
    add("--write", type=Path, metavar="FILE.yaml", help="write the chosen plan as a recipe")
    add("--seed", type=positive_int, default=1, help="random seed for sampling response lengths (default: %(default)s)")
    add("--json", action="store_true", help="print the plans as JSON")


@dataclass(frozen=True)
class _PlanRequest:
    config: Config
    facts: dict[str, ModelConfig]
    gpu: Gpu
    workload: Workload
    windows: list[int]
    pinned: frozenset[str]


def run(arguments: argparse.Namespace) -> int:
    request = _request(arguments)
    search = PlanSearch(request.config, request.facts, request.gpu, request.pinned)
    ranking = PlanRanking(request.config, request.facts["policy"], request.gpu, request.workload, request.windows, arguments.seed)
    plans = ranking.best(splits(search, arguments.gpus), max(arguments.top, arguments.choose))
    if not plans:
        raise UserError(no_plan_message(search, arguments.gpus, arguments.gpu, fewest_gpus(search)))
    if arguments.choose > len(plans):
        raise UserError(f"--choose {arguments.choose}: expected a number up to {len(plans)}, the number of plans found")
    chosen = plans[arguments.choose - 1]
    planned = PlanReport(search, plans, chosen, arguments.gpus, arguments.gpu, request.workload.lengths.text)
    if arguments.json:
        print(json.dumps([_numbers(one.config) | {"response_s": one.response_s, **asdict(one.outcome)} for one in plans], indent=2))
    else:
        print_plans(planned)
    if arguments.write:
        write_atomic(arguments.write, recipe_text(planned))
        say(f"wrote {arguments.write}")
        _print_missing_keys(chosen.config)
    return 0


def _print_missing_keys(config: Config) -> None:
    """Print what the recipe still lacks before a dry run accepts it: keys that a plan does not choose."""
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


def _request(arguments: argparse.Namespace) -> _PlanRequest:
    named, words = split_overrides(arguments.words)
    paths = [*arguments.config, *named]
    device = _gpu(arguments)
    if arguments.gpus > device.per_machine and arguments.gpus % device.per_machine:
        raise UserError(
            f"--gpus {arguments.gpus}: expected whole nodes of {device.per_machine} {arguments.gpu}, "
            f"{arguments.gpus // device.per_machine * device.per_machine} or "
            f"{(arguments.gpus // device.per_machine + 1) * device.per_machine}, or a part of one node"
        )
    config = _config(arguments, paths, words)
    facts = {name: _facts(_folder(arguments, config, folder)) for name, folder in model_folders(config).items()}
    _check_context(config, facts["policy"])
    # Keys given on the command line are not searched.
    pinned = {word.partition("=")[0].strip() for word in words} & set(CHOSEN)
    if arguments.windows:
        # The option lists values to compare, so this key is searched.
        pinned.discard("batch.window_tokens")
    most = config.batch.max_response_tokens
    usual = f"lognormal:median={max(most / 8, 1):g},sigma=1,max={most}"
    lengths = parse_lengths(arguments.lengths) if arguments.lengths else named_lengths(usual)
    workload = Workload(lengths, parse_lengths(arguments.prompts))
    return _PlanRequest(config, facts, device, workload, _windows(arguments.windows, config, pinned), frozenset(pinned))


def _gpu(arguments: argparse.Namespace) -> Gpu:
    return gpu(arguments.gpu, arguments.gpu_file) if arguments.gpu_file else gpu(arguments.gpu)


def _config(arguments: argparse.Namespace, paths: Sequence[str], words: Sequence[str]) -> Config:
    given = [] if paths else list(_WITHOUT_RECIPE)
    if arguments.preset or not paths:
        given.append(f"preset={arguments.preset or _DEFAULT_PRESET}")
    config = load_config(list(paths), [*given, *words])
    if arguments.model and not config.policy.path:
        config = replace(config, policy=replace(config.policy, path=str(_model_folder(arguments.model))))
    if not config.policy.path:
        raise UserError("expected --model CONFIG, a folder with config.json, or a recipe with policy.path")
    batch = config.batch
    if arguments.sequence_tokens:
        batch = replace(batch, max_prompt_tokens=min(batch.max_prompt_tokens, max(arguments.sequence_tokens // 4, 1)))
        batch = replace(batch, max_response_tokens=max(arguments.sequence_tokens - batch.max_prompt_tokens, 1))
        batch = replace(batch, window_tokens=0 if batch.window_tokens > batch.max_response_tokens else batch.window_tokens)
    if arguments.slots:
        if arguments.slots % batch.num_samples_per_prompt:
            raise UserError(
                f"--slots {arguments.slots}: expected a multiple of batch.num_samples_per_prompt={batch.num_samples_per_prompt}"
            )
        slots = arguments.slots
        batch = replace(
            batch,
            num_prompts_per_step=slots // batch.num_samples_per_prompt,
            policy_minibatch_size=min(batch.policy_minibatch_size, slots),
            critic_minibatch_size=min(batch.critic_minibatch_size, slots),
        )
    return replace(config, batch=batch)


def _model_folder(path: Path) -> Path:
    return path.parent if path.name == "config.json" else path


def _folder(arguments: argparse.Namespace, config: Config, folder: str) -> str:
    """Folder to read a model from: ``--model`` replaces policy.path, which may be on another node."""
    return str(_model_folder(arguments.model)) if arguments.model and folder == config.policy.path else folder


def _facts(folder: str) -> ModelConfig:
    if not (Path(folder) / "config.json").is_file():
        raise UserError(f"{folder}: expected a folder with a model's config.json; its weights are not needed")
    model = read_model_json(folder)
    if not is_supported(model.get("model_type")):
        raise UserError(
            f"{folder}/config.json: model_type {model.get('model_type')!r} is not supported; supported are {', '.join(families())}"
        )
    facts = as_config(model)
    try:
        num_parameters(facts), flops_cost(facts)
    except AttributeError as error:
        raise UserError(f"{folder}/config.json lacks {error.name}, which is needed to compute the model's size") from error
    return facts


def _check_context(config: Config, facts: ModelConfig) -> None:
    longest = config.batch.max_prompt_tokens + config.batch.max_response_tokens
    context = getattr(facts, "max_position_embeddings", 0)
    if 0 < context < longest:
        raise UserError(
            f"a prompt and its response may have {longest:,} tokens (batch.max_prompt_tokens + batch.max_response_tokens), but the "
            f"model's context ends at {context:,} (max_position_embeddings); plan with --sequence-tokens {context}"
        )


def _windows(given: list[int] | None, config: Config, pinned: set[str]) -> list[int]:
    """Values of batch.window_tokens to compare; [0] in sync mode."""
    most, own = config.batch.max_response_tokens, config.batch.window_tokens
    if config.schedule.mode is Mode.sync:
        if given:
            raise UserError("--windows: schedule.mode=sync generates whole responses; expected mode tppo or async")
        return [0]
    if too_long := [window for window in given or () if window > most]:
        raise UserError(f"--windows {too_long[0]}: longer than a response may become (batch.max_response_tokens={most})")
    if given or "batch.window_tokens" in pinned:
        return list(dict.fromkeys(given or [own]))
    own = own or max(most // 3, 1)
    return sorted({window for window in (max(own // 2, 1), own, 2 * own) if window <= most})
