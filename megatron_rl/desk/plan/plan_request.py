"""The request of `megatron-rl plan`, made from its arguments: a configuration, its models, GPUs and a workload."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.config.load import flat_params, load_config
from megatron_rl.config.schedule_facts import Overlap, overlap_of
from megatron_rl.config.schema import Config
from megatron_rl.desk.costs.gpus import Gpu, gpu
from megatron_rl.desk.costs.parameter_counts import num_parameters
from megatron_rl.desk.costs.run_memory import model_folders
from megatron_rl.desk.plan.plan_ranking import usual_windows
from megatron_rl.desk.plan.plan_search import CHOSEN, CRITIC_LAYOUT, NUM_RANKS, NUM_SERVERS, URLS
from megatron_rl.desk.plan.schedule_comparison import SLOTS
from megatron_rl.desk.simulate.lengths import named_lengths
from megatron_rl.desk.simulate.prediction import Workload
from megatron_rl.desk.simulate.recorded_run import parse_lengths
from megatron_rl.desk.simulate.slot_simulation import parse_waits
from megatron_rl.errors import UserError
from megatron_rl.families.family import ModelConfig, families
from megatron_rl.families.flops import flops_cost
from megatron_rl.families.model_facts import as_config, is_supported, read_model_json
from megatron_rl.system.command_line.terminal import parse_options, split_overrides
from megatron_rl.system.files.hub_cache import download_hint, find_download

DEFAULT_PRESET = "tppo"
_WITHOUT_RECIPE = ("policy.dtype=bfloat16", "rollout.start_timeout_s=1800", "data.train_files=[data/train.jsonl]")
"""Keys that a GPU recipe usually sets, used if no recipe is given; a user's recipe is not changed."""


@dataclass(frozen=True)
class PlanRequest:
    config: Config
    facts: dict[str, ModelConfig]
    gpu: Gpu
    workload: Workload
    windows: list[int]
    pinned: frozenset[str]
    given: frozenset[str]
    """All keys given on the command line."""


def make_plan_request(arguments: argparse.Namespace) -> PlanRequest:
    named, words = split_overrides(arguments.words)
    paths = [*arguments.config, *named]
    device = gpu(arguments.gpu, arguments.gpu_file) if arguments.gpu_file else gpu(arguments.gpu)
    if arguments.gpus > device.per_machine and arguments.gpus % device.per_machine:
        raise UserError(
            f"--gpus {arguments.gpus}: expected whole nodes of {device.per_machine} {arguments.gpu}, "
            f"{arguments.gpus // device.per_machine * device.per_machine} or "
            f"{(arguments.gpus // device.per_machine + 1) * device.per_machine}, or a part of one node"
        )
    config = _config(arguments, paths, words)
    facts = {name: _facts(_folder(arguments, config, folder)) for name, folder in model_folders(config).items()}
    _check_context(config, facts["policy"])
    given = flat_params(parse_options(words)) | ({SLOTS: arguments.slots} if arguments.slots else {})
    pinned = _pinned(given)
    if URLS in pinned:
        config, pinned = replace(config, rollout=replace(config.rollout, num_servers=len(config.rollout.urls))), pinned | {NUM_SERVERS}
    if arguments.windows:
        # The option lists values to compare, so this key is searched.
        pinned.discard("batch.window_tokens")
    most = config.batch.max_response_tokens
    usual = f"lognormal:median={max(most / 8, 1):g},sigma=1,max={most}"
    lengths = parse_lengths(arguments.lengths) if arguments.lengths else named_lengths(usual)
    workload = Workload(lengths, parse_lengths(arguments.prompts), parse_waits(arguments.tool_times))
    return PlanRequest(config, facts, device, workload, _windows(arguments.windows, config, pinned), frozenset(pinned), frozenset(given))


def _pinned(given: Mapping[str, Any]) -> set[str]:
    """Return the given keys that a plan would choose; they are not searched."""
    pinned = {key for key in given if key in CHOSEN or key.startswith(f"{CRITIC_LAYOUT}.")}
    # 0 ranks mean "as many as the launcher starts".
    return pinned - {NUM_RANKS} if given.get(NUM_RANKS) == 0 else pinned


def _config(arguments: argparse.Namespace, paths: Sequence[str], words: Sequence[str]) -> Config:
    given = [] if paths else list(_WITHOUT_RECIPE)
    if arguments.preset or not paths:
        given.append(f"preset={arguments.preset or DEFAULT_PRESET}")
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
    return path.parent if path.name == "config.json" else Path(find_download(str(path), "model"))


def _folder(arguments: argparse.Namespace, config: Config, folder: str) -> str:
    """Return ``folder``, or ``--model`` if given and ``folder`` is policy.path, which may exist only on another node."""
    return str(_model_folder(arguments.model)) if arguments.model and folder == config.policy.path else folder


def _facts(folder: str) -> ModelConfig:
    if not (Path(folder) / "config.json").is_file():
        hint = download_hint(folder, "model")
        raise UserError(f"{folder}: expected a folder with a model's config.json; its weights are not needed{hint}")
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
    if overlap_of(config.schedule) is Overlap.nothing:
        if given:
            raise UserError("--windows: schedule.mode=sync generates whole responses; expected mode tppo or async")
        return [0]
    if too_long := [window for window in given or () if window > most]:
        raise UserError(f"--windows {too_long[0]}: longer than the longest response (batch.max_response_tokens={most})")
    if given or "batch.window_tokens" in pinned:
        return list(dict.fromkeys(given or [own]))
    return usual_windows(config)
