"""`--dry-run`: the resolved configuration, for reinforcement learning also the batch arithmetic, the stage graph and memory."""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from megatron_rl.config.derived import (
    critic_shares_base,
    eval_sets,
    max_new_tokens,
    needs_critic,
    needs_reference,
    num_responses_per_step,
    sends_adapters,
    shares_base,
    uses_attached_servers,
)
from megatron_rl.config.layout import critic_layout, expert_tensor_size, ranks_of_replica
from megatron_rl.config.load import config_to_yaml, flat_params, load_config
from megatron_rl.config.schedule_facts import (
    Overlap,
    facts_of,
    max_trained_windows,
    max_windows,
    overlap_of,
    why_not_ahead,
)
from megatron_rl.config.schema import Config, Dtype, Overlong, ParallelConfig
from megatron_rl.config.schema.commands import RL_COMMANDS
from megatron_rl.desk.costs.parameter_counts import num_parameters
from megatron_rl.desk.plan.memory_table import print_memory
from megatron_rl.families.model_facts import dims
from megatron_rl.models.hf.adapter_folder import adapter_shapes
from megatron_rl.models.hf.model_config import load_hf_config
from megatron_rl.schedule.table import make_graph
from megatron_rl.system.command_line.terminal import LINES

_MOST_DEVICES = 8
"""GPUs of a usual node. The number is fixed, because the dry run may run on a machine without GPUs."""
_OTHER_COMMANDS = ("sft", "critic_pretrain", "reward_train", "dpo", "label_lines", "select_prompts")
"""Sections that one command reads; a recipe may serve several commands."""
_OF_CRITIC = ("critic.", "algorithm.lambda_critic", "algorithm.critic_", "algorithm.value_clip_", "batch.critic_", "schedule.critic_")
_OF_SERVERS = ("num_servers", "port", "start_timeout_s", "max_restarts")
_OF_WEIGHTS = tuple(f"algorithm.correction.{name}" for name in ("max_weight", "icepop_", "normalize"))
_OF_WINDOWS = ("batch.window_jitter_tokens", "algorithm.ignore_boundary_tokens", "algorithm.bootstrap", "schedule.training_window_tokens")


def print_plan(config: Config, *, command: str, world_size: int, inputs: Sequence[str] = ()) -> None:
    """Print the dry run of ``command``. ``inputs``: lines on the data that the command reads."""
    console = Console()
    console.rule("resolved configuration")
    text = config_to_yaml(config)
    console.print(Syntax(text, "yaml", background_color="default") if console.is_terminal else text, soft_wrap=True)
    if command in RL_COMMANDS:
        console.rule("batch arithmetic")
        console.print(_arithmetic_table(config, world_size))
        console.rule(f"stages of a step (schedule.mode={config.schedule.mode.value})")
        console.print(_stage_table(config))
    if command == "train" and _has_model(config):
        console.rule("memory")
        print_memory(console, config, world_size)
    if inputs:
        console.rule("inputs")
        for line in inputs:
            console.print(line.translate(LINES), soft_wrap=True, markup=False, highlight=False)
    late = _late_training(config) if command == "train" else []
    unused = unused_keys(config, command) if command in RL_COMMANDS else ()
    for note in (*_notes(config, world_size), *_lora_notes(config, command), *late, *unused):
        console.print(f"note: {note}", soft_wrap=True)
    console.print(
        f"dry run: the configuration is good for `megatron-rl {command}`; nothing was started", soft_wrap=True
    )


def _has_model(config: Config) -> bool:
    return (Path(config.policy.path) / "config.json").is_file()


def _notes(config: Config, world_size: int) -> list[str]:
    cores = os.cpu_count() or 1
    if config.parallel.num_ranks == 0 and world_size > 1 and "RANK" not in os.environ:
        return [f"parallel.num_ranks is not set: this is the plan of {world_size} ranks, the fewest that the layout needs"]
    if config.parallel.num_ranks <= max(cores, _MOST_DEVICES) or "RANK" in os.environ:
        return []
    return [
        f"parallel.num_ranks={world_size} is more than this node has ({cores} cores); without a launcher such as srun or "
        "torchrun on several nodes, all ranks start here"
    ]


def _lora_notes(config: Config, command: str) -> Iterator[str]:
    if not config.policy.lora.rank or not _has_model(config):
        return
    lora, model = config.policy.lora, load_hf_config(config.policy.path)
    number_bytes = 4 if config.policy.dtype is Dtype.float32 else 2
    whole = number_bytes * num_parameters(model)
    adapters = number_bytes * sum(math.prod(shape) for shape in adapter_shapes(model, lora.targets, lora.rank).values())
    yield f"policy.lora: adapters of {adapters / number_bytes:,.0f} parameters train, {adapters / whole:.2%} of the model"
    if command not in RL_COMMANDS:
        return
    if sends_adapters(config):
        share = f"{adapters / 1e6:,.1f} MB, {adapters / whole:.2%}"
        yield f"the first publish sends the model ({whole / 1e6:,.1f} MB), and each one the adapters ({share})"
    else:
        yield f"each publish sends all weights, with the adapters merged ({whole / 1e6:,.1f} MB; policy.lora.sync=merged)"
    if shares_base(config):
        yield f"the reference is the policy without its adapters, on the same weights: saves {whole / 1e6:,.1f} MB per replica"
    if critic_shares_base(config):
        body = whole - (0 if model.tie_word_embeddings else number_bytes * dims(model)["vocab"] * dims(model)["hidden"])
        yield f"the critic's adapters train on the policy's weights: saves {body / 1e6:,.1f} MB per replica"


def _late_training(config: Config) -> list[str]:
    """Notes on warm-ups that are longer than the run, as in a short trial of a recipe for a long one."""
    warmups = {"critic.warmup_steps": (config.critic.warmup_steps if needs_critic(config) else 0, "the policy never trains")}
    warmups["policy.optimizer.warmup_steps"] = (config.policy.optimizer.warmup_steps, "the learning rate never reaches policy.optimizer.lr")
    return [
        f"{key}={steps} covers all of run.num_steps={config.run.num_steps}: {effect}"
        for key, (steps, effect) in warmups.items()
        if steps >= config.run.num_steps
    ]


def _arithmetic_table(config: Config, world_size: int) -> Table:
    layouts = [_layout_text(config.parallel, world_size)]
    if config.critic.parallel:
        layouts = [f"policy: {layouts[0]}", f"critic: {_layout_text(config.critic.parallel, world_size)}"]
    table = Table(title="\n".join(layouts), title_justify="left")
    table.add_column("quantity")
    for name in ("global, per step", "per data-parallel rank", "per micro-batch"):
        table.add_column(name, justify="right")
    for name, values in batch_arithmetic(config, world_size).items():
        table.add_row(name, *values)
    return table


def _layout_text(parallel: ParallelConfig, world_size: int) -> str:
    """The sizes of a layout as one line of text."""
    sizes = {
        "tensor": parallel.tensor_parallel_size,
        "context": parallel.context_parallel_size,
        "pipeline": parallel.pipeline_parallel_size,
        "data": data_parallel_size(parallel, world_size),
    }
    always = ("tensor", "pipeline", "data")
    text = f"{world_size} ranks = " + " x ".join(f"{k} {n}" for k, n in sizes.items() if n > 1 or k in always)
    if parallel.expert_parallel_size > 1:
        text += f"; experts over {parallel.expert_parallel_size} x {expert_tensor_size(parallel)} of a stage's ranks"
    if parallel.virtual_pipeline_size > 1:
        text += f"; {parallel.virtual_pipeline_size} chunks per pipeline rank"
    return text


def _stage_table(config: Config) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("stage", no_wrap=True)
    table.add_column("runs on", no_wrap=True)
    table.add_column("waits for (k-1: previous step; k+1: next step)", overflow="fold")
    table.add_column("makes", overflow="fold")
    for stage in make_graph(facts_of(config)):
        waits = [f"{product}(k{-distance:+})" if distance else product for product, distance in stage.waits_for]
        runs_on = "+".join(sorted(resource.value for resource in stage.occupies))
        table.add_row(stage.name, runs_on, ", ".join(waits), ", ".join(stage.products))
    return table


def data_parallel_size(parallel: ParallelConfig, world_size: int) -> int:
    return world_size // ranks_of_replica(parallel)


def batch_arithmetic(config: Config, world_size: int) -> dict[str, tuple[str, str, str]]:
    """Quantities of a step: name -> (over all ranks, on one data-parallel rank, in one micro-batch).

    The numbers are upper bounds if lengths vary.
    A micro-batch has at most max_tokens_per_microbatch tokens. Only the critic's update uses the critic's replicas.
    """
    batch, ranks = config.batch, data_parallel_size(config.parallel, world_size)
    critic_ranks = data_parallel_size(critic_layout(config), world_size)
    samples = num_responses_per_step(config)
    smallest = min([batch.num_samples_per_prompt, *batch.num_samples_by_type.values()])
    new_tokens = max_new_tokens(config)
    longest = batch.max_prompt_tokens + batch.max_response_tokens
    budget = batch.max_tokens_per_microbatch
    minibatch = min(batch.policy_minibatch_size, samples)

    def row(total: int, unit: int, bound: str = "", ranks: int = ranks) -> tuple[str, str, str]:
        return f"{bound}{total:,}", f"{bound}{math.ceil(total / ranks):,}", f"up to {unit:,}" if unit else "-"

    per_micro = max(1, budget // longest)
    updates = f"{math.ceil(samples / minibatch):,}"
    rows = {
        "prompts": row(samples // smallest, 0, "up to " if batch.num_samples_by_type else ""),
        "samples (slots)": row(samples, per_micro),
        "new tokens (window)": row(samples * new_tokens, min(budget, per_micro * new_tokens), "up to "),
        "trained sequence tokens": row(samples * longest, max(budget, longest), "up to "),
        "samples per policy update": row(minibatch, per_micro),
        "policy updates": (updates, updates, "-"),
        "windows of the longest response": (f"{max_windows(config):,}", "-", "-"),
        "oldest trained token (weight versions)": (_largest_staleness(config), "-", "-"),
    }
    if needs_critic(config):
        critic_minibatch = min(batch.critic_minibatch_size, samples)
        rows["samples per critic update"] = row(critic_minibatch, per_micro, "up to ", critic_ranks)
    return rows


def _largest_staleness(config: Config) -> str:
    """Text of the largest number of policy updates between the weights that sample a token and the update that it trains."""
    facts = facts_of(config)
    updates = max_trained_windows(config) - 1 + facts.ahead
    # Aborted windows are shorter, and the responses of a group may start in different steps.
    is_open = facts.whole_groups or config.rollout.over_sampling > 1
    return f"{updates} or more" if is_open and facts.windows and facts.training_window_tokens > 1 else f"{updates}"


def unused_keys(config: Config, command: str) -> Iterator[str]:
    """Yield a note for each reason, with the unread keys whose values differ from those of the preset."""
    layers = [f"preset={config.preset}"] if config.preset else []
    usual, given = (flat_params(one) for one in (load_config(None, layers), config))
    changed = [key for key, value in given.items() if usual.get(key) != value]
    for reason, starts in _unread(config):
        if keys := [key for key in changed if key.startswith(starts) and key not in reason]:
            yield f"{', '.join(keys)}: not read by this run, because {reason}"
    others = [name for name in _OTHER_COMMANDS if name != command.replace("-", "_")]
    if sections := [name for name in others if any(key.startswith(f"{name}.") for key in changed)]:
        yield f"{', '.join(sections)}: read by other commands than `megatron-rl {command}`, which check them"


def _unread(config: Config) -> list[tuple[str, tuple[str, ...]]]:
    """(reason, beginnings of the keys that are not read because of it) of each reason that holds."""
    algorithm, rollout, process = config.algorithm, config.rollout, config.reward.process
    correction, overlap = algorithm.correction, overlap_of(config.schedule)
    rows: list[tuple[bool, str, tuple[str, ...]]] = [
        (not needs_critic(config) and not process.path, f"algorithm.advantage={algorithm.advantage} has no critic", _OF_CRITIC),
        (not needs_reference(config), "algorithm.kl.place=none", ("reference.", "algorithm.kl.")),
        (not config.environment.name, "environment.name is empty", ("environment.",)),
        (not process.path, "reward.process.path is empty", ("reward.process.",)),
        (bool(config.reward.by_type), "reward.by_type has the rewards of all types", ("reward.name", "reward.options")),
        (not rollout.fire.temperature, "rollout.fire.temperature=0", ("rollout.fire.",)),
        (uses_attached_servers(rollout), "its servers are attached", tuple(f"rollout.{name}" for name in _OF_SERVERS)),
        (overlap < Overlap.training, f"schedule.{why_not_ahead(config.schedule)}", ("schedule.max_staleness", "schedule.weight_update")),
        (overlap is Overlap.nothing, "full responses have no windows", _OF_WINDOWS),
        (algorithm.overlong is not Overlong.soft, f"algorithm.overlong={algorithm.overlong.value}", ("algorithm.overlong_",)),
        (not algorithm.dynamic_sampling.enabled, "algorithm.dynamic_sampling.enabled=false", ("algorithm.dynamic_sampling.max_",)),
        (correction.weight == "none", "algorithm.correction.weight=none", _OF_WEIGHTS),
        (correction.rejection == "none", "algorithm.correction.rejection=none", ("algorithm.correction.rejection_",)),
        (not eval_sets(config), "there are neither data.eval_files nor eval.sets", ("eval.",)),
        (not config.policy.lora.rank, "policy.lora.rank=0", ("policy.lora.",)),
        (not config.critic.lora.rank, "critic.lora.rank=0", ("critic.lora.",)),
        (not config.profile.steps, "profile.steps is empty", ("profile.",)),
    ]
    return [(reason, starts) for holds, reason, starts in rows if holds]
