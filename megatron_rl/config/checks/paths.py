"""Files that are read, folders of models, places for results."""

from collections.abc import Iterator
from pathlib import Path

from megatron_rl.config.derived import eval_sets, needs_reference
from megatron_rl.config.schema import Config, Init
from megatron_rl.config.schema.commands import RL_COMMANDS


def problems(config: Config, command: str) -> Iterator[str]:
    read = _files_read(config, command)
    first = next(iter(read), "")
    if first and not read[first]:
        yield f"{first}: expected at least one file, got none"
    for key, names in read.items():
        yield from (f"{key}: {name} does not exist" for name in names if not Path(name).exists())
    if command == "train" and config.eval.every_steps and not eval_sets(config):
        yield "data.eval_files: eval.every_steps is set, but there is no file to evaluate on; give some, or eval.sets"
    if command == "train" and config.eval.stop_at_accuracy and not config.eval.every_steps:
        yield "eval.every_steps: eval.stop_at_accuracy needs evaluations; set eval.every_steps"
    output = _output(config, command)
    if output and not output[1]:
        yield f"{output[0]}: expected a place for the result, got nothing"
    yield from _not_a_folder("run.output_dir", config.run.output_dir)
    for key, path in folders_read(config, command).items():
        yield from _model_folder(key, path, weights=key != "policy.path" or config.policy.init is Init.checkpoint)


def _not_a_folder(key: str, path: str) -> Iterator[str]:
    """Where a file stands in the way of a folder."""
    for place in (Path(path), *Path(path).parents):
        if place.exists() and not place.is_dir():
            yield f"{key}: expected a folder, but {place} is a file; give another one"


def _files_read(config: Config, command: str) -> dict[str, list[str]]:
    """Key -> files; the first key, if there is one, needs at least one."""
    data, reward = config.data, config.reward_train
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
    if command == "label-lines":
        return {"label_lines.input_path": [path for path in [config.label_lines.input_path] if path]}
    return {"data.train_files": data.train_files, **_eval_files(config)}


def _eval_files(config: Config) -> dict[str, list[str]]:
    """The sets with names first, where there are some."""
    named = {f"eval.sets.{name}.files": one.files for name, one in config.eval.sets.items()}
    return {**named, "data.eval_files": config.data.eval_files}


def _output(config: Config, command: str) -> tuple[str, str] | None:
    """Key and value of the place for the result; None for a command whose results lie under run.output_dir."""
    return {
        "sft": ("sft.output_path", config.sft.output_path),
        "critic-pretrain": ("critic_pretrain.output_path", config.critic_pretrain.output_path),
        "reward-train": ("reward_train.output_path", config.reward_train.output_path),
        "label-lines": ("label_lines.output_path", config.label_lines.output_path),
        "select-prompts": ("select_prompts.output_path", config.select_prompts.output_path),
    }.get(command)


def folders_read(config: Config, command: str) -> dict[str, str]:
    """Key -> folder of a model that the command loads."""
    folders = {"policy.path": config.policy.path}
    if command == "select-prompts" and config.select_prompts.scores_path:
        folders.clear()
    if command in RL_COMMANDS:
        optional = {
            "critic.path": config.critic.path,
            "reference.path": config.reference.path if needs_reference(config) else "",
            "reward.process.path": config.reward.process.path,
        }
        folders |= {key: path for key, path in optional.items() if path}
    return folders


def _model_folder(key: str, path: str, *, weights: bool) -> Iterator[str]:
    if not path:
        yield f"{key}: expected a Hugging Face model folder, got nothing"
    elif not (Path(path) / "config.json").is_file():
        yield f"{key}: {path} has no config.json; expected a Hugging Face model folder"
    elif weights and not any(Path(path).glob("*.safetensors")):
        yield f"{key}: {path} has no *.safetensors; give a folder with weights, or set policy.init=random for fresh ones"
