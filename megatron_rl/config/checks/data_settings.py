"""Checks of inputs and outputs: files, model folders, prompt settings and evaluation sets."""

import re
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.config.derived import eval_sets, is_served, needs_reference
from megatron_rl.config.schema import Config, DataConfig, Init
from megatron_rl.config.schema.commands import RL_COMMANDS
from megatron_rl.system.files.hub_cache import download_hint

TAKEN_ARGUMENTS = (
    "add_generation_prompt", "continue_final_message", "conversation", "max_length", "messages", "padding",
    "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation",
)  # fmt: skip
"""Arguments of ``apply_chat_template`` that rows and recipes cannot set, because prompts have one format."""
_SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_RESERVED_NAMES = ("reward", "dialogue")
"""Reserved because eval/<name>/... are metrics over all sets."""


def path_problems(config: Config, command: str) -> Iterator[str]:
    read = _files_read(config, command)
    first = next(iter(read), "")
    if first and not read[first]:
        yield f"{first}: expected at least one file, got none"
    for key, names in read.items():
        missing = [name for name in names if not (name and Path(name).exists())]
        yield from (f"{key}: {name or repr(name)} does not exist{download_hint(name, 'dataset')}" for name in missing)
    if config.data.image_dir and not Path(config.data.image_dir).is_dir():
        yield f"data.image_dir: there is no folder {config.data.image_dir}"
    if command == "train" and config.eval.every_steps and not eval_sets(config):
        yield "data.eval_files: eval.every_steps is set, but there is no file to evaluate on; give files, or eval.sets"
    if command == "train" and config.eval.stop_at_accuracy and not config.eval.every_steps:
        yield "eval.every_steps: eval.stop_at_accuracy needs evaluations; set eval.every_steps"
    output = output_of(config, command)
    if output and not output[1]:
        yield f"{output[0]}: expected a path for the result, got nothing"
    yield from _not_a_folder("run.output_dir", config.run.output_dir)
    written = {"run.output_dir": config.run.output_dir, **({output[0]: output[1]} if output else {})}
    for key, path in folders_read(config, command).items():
        same = [one for one, target in written.items() if path and target and Path(target).resolve() == Path(path).resolve()]
        yield from (f"{one}: it is {key}, which would be overwritten; give another folder" for one in same)
        yield from _model_folder(key, path, weights=key != "policy.path" or config.policy.init is Init.checkpoint)


def _not_a_folder(key: str, path: str) -> Iterator[str]:
    """Report a file at ``path`` or at one of its parents."""
    for place in (Path(path), *Path(path).parents):
        if place.exists() and not place.is_dir():
            yield f"{key}: expected a folder, but {place} is a file; give another path"


def _files_read(config: Config, command: str) -> dict[str, list[str]]:
    """Map keys to input files; the first key, if any, needs at least one file."""
    data, reward, dpo = config.data, config.reward_train, config.dpo
    if command == "sft" and config.sft.train_files:
        return {"sft.train_files": config.sft.train_files}
    if command in ("sft", "select-prompts"):
        return {"data.train_files": data.train_files}
    if command == "evaluate":
        return _eval_files(config)
    if command == "doctor":
        return {}
    if command == "reward-train":
        return {"reward_train.train_files": reward.train_files, "reward_train.eval_files": reward.eval_files}
    if command == "dpo":
        return {"dpo.train_files": dpo.train_files, "dpo.eval_files": dpo.eval_files}
    if command == "label-lines":
        return {"label_lines.input_path": [path for path in [config.label_lines.input_path] if path]}
    return {"data.train_files": data.train_files, **_eval_files(config)}


def _eval_files(config: Config) -> dict[str, list[str]]:
    """Map keys to evaluation files, named sets first."""
    named = {f"eval.sets.{name}.files": one.files for name, one in config.eval.sets.items()}
    return {**named, "data.eval_files": config.data.eval_files}


def output_of(config: Config, command: str) -> tuple[str, str] | None:
    """Key and value of the output path; None for a command that writes its results under run.output_dir."""
    return {
        "sft": ("sft.output_path", config.sft.output_path),
        "critic-pretrain": ("critic_pretrain.output_path", config.critic_pretrain.output_path),
        "reward-train": ("reward_train.output_path", config.reward_train.output_path),
        "dpo": ("dpo.output_path", config.dpo.output_path),
        "label-lines": ("label_lines.output_path", config.label_lines.output_path),
        "select-prompts": ("select_prompts.output_path", config.select_prompts.output_path),
    }.get(command)


def folders_read(config: Config, command: str) -> dict[str, str]:
    """Map keys to the model folders that the command loads."""
    folders = {"policy.path": config.policy.path}
    if command == "select-prompts" and config.select_prompts.scores_path:
        folders.clear()
    if command in RL_COMMANDS:
        optional = {
            "critic.path": config.critic.path,
            **{key: path for key, path in references(config).items() if not is_served(path)},
            "reward.process.path": config.reward.process.path,
        }
        folders |= {key: path for key, path in optional.items() if path}
    return folders


def references(config: Config) -> dict[str, str]:
    """Map keys to the folders or servers of the run's references; "" for the policy's own."""
    by_type = {f"reference.path_by_type.{name}": path for name, path in config.reference.path_by_type.items()}
    return {"reference.path": config.reference.path, **by_type} if needs_reference(config) else {}


def _model_folder(key: str, path: str, *, weights: bool) -> Iterator[str]:
    if not path:
        yield f"{key}: expected a Hugging Face model folder, got nothing"
    elif not (Path(path) / "config.json").is_file():
        yield f"{key}: {path} has no config.json; expected a Hugging Face model folder{download_hint(path, 'model')}"
    elif weights and not any(Path(path).glob("*.safetensors")):
        yield f"{key}: {path} has no *.safetensors; give a folder with weights, or set policy.init=random for random weights"


def prompt_problems(data: DataConfig) -> Iterator[str]:
    taken = sorted(set(data.chat_template_kwargs) & set(TAKEN_ARGUMENTS))
    if taken:
        yield f"data.chat_template_kwargs: {reserved_argument_problem(taken[0])}"
    levels, budget = data.video_frame_tokens, data.max_video_tokens
    if not levels or min(levels) < 1:
        yield f"data.video_frame_tokens: expected at least one number of tokens above 0, got {list(levels)}"
    elif budget < min(levels):
        yield f"data.max_video_tokens: expected enough for one frame of {min(levels)} tokens, got {budget}"
    if data.system_prompt and not data.use_chat_template:
        yield "data.system_prompt: plain prompts have no system message; set data.use_chat_template=true, or leave it empty"


def reserved_argument_problem(name: str) -> str:
    """Error message for a chat-template argument in ``TAKEN_ARGUMENTS``."""
    hint = "; tools have their own column (data.tools_field)" if name == "tools" else ""
    return f"{name!r} is set by megatron_rl itself, remove it{hint}"


def eval_problems(config: Config) -> Iterator[str]:
    if config.run.keep_best and not config.eval.every_steps:
        yield "run.keep_best: the best checkpoints are chosen by eval/accuracy, and there are no evaluations; set eval.every_steps, or 0"
    if config.data.eval_files and config.eval.sets:
        yield (
            "eval.sets: data.eval_files is already a set, without a name; list its files under a name in eval.sets and "
            "leave data.eval_files empty"
        )
    for name, given in config.eval.sets.items():
        if not _SET_NAME.fullmatch(name) or name in _RESERVED_NAMES:
            yield (
                f"eval.sets: {name!r} becomes part of metrics' names: expected letters, digits, _ . and -, and none of "
                f"{', '.join(_RESERVED_NAMES)}"
            )
        if not given.files:
            yield f"eval.sets.{name}.files: expected at least one file, got none"
    for name, one in eval_sets(config).items():
        key = f"eval.sets.{name}" if name else "eval"
        if one.temperature != 0:
            continue
        if one.num_samples > 1:
            yield (
                f"{key}.num_samples: {one.num_samples} samples at temperature 0 are {one.num_samples} times the same "
                f"response; set {key}.temperature above 0 (the papers: 0.6 or 1), or num_samples=1"
            )
        if (one.top_p, one.top_k) != (1.0, -1):
            yield (
                f"{key}.top_p, top_k: temperature 0 always takes the most likely token, got {one.top_p} and "
                f"{one.top_k}; set {key}.temperature above 0, or leave them at 1 and -1"
            )
