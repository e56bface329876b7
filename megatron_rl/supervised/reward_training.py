"""`megatron-rl reward-train`: trains reward models on preferences or line labels. Three kinds, and DPO, share one loop.

The kinds with a value head write critics, which critic.path and reward.process.path accept directly.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from rich.console import Console

from megatron_rl.config.derived import is_due
from megatron_rl.config.schema import Config, DpoConfig, RewardModelKind, RewardTrainConfig
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.errors import DataError, UserError
from megatron_rl.models.hf.weights import write_score_head
from megatron_rl.parallel.topology import Topology
from megatron_rl.rewards.judges.templates import PAIRWISE_TEMPLATE
from megatron_rl.supervised.fine_tuning import epoch_batches
from megatron_rl.supervised.reward_models import ExampleTrainer, RewardExample, build_kind
from megatron_rl.system.command_line.terminal import progress_bar
from megatron_rl.training.engine import Engine
from megatron_rl.training.trainer_group import TrainerGroup
from megatron_rl.training.trainer_ranks import trainer_ranks

_RECORD_FILE = "reward_training.json"
"""File in the output folder with the model's kind, data and training history."""
History = list[dict[str, float]]
"""Metrics of every step; those of held-out examples have the prefix ``eval/``."""
_PRINT_EVERY_STEPS = 25
_EVALUATION_CHUNK = 256
"""Number of examples per prediction."""


def _reward_engine(kind: RewardModelKind) -> str:
    """Name and role of the engine that a kind trains."""
    return "policy" if kind is RewardModelKind.pairwise else "critic"


def training_config(config: Config) -> Config:
    """The configuration of the ranks: values are regressed without PPO's clip."""
    return replace(
        config,
        algorithm=replace(
            config.algorithm,
            value_clip_low=0.0,
            value_clip_high=0.0,
            critic_aggregation="token_mean",
            critic_aggregation_options={},
        ),
    )


def reward_train(config: Config) -> None:
    """Train the reward model and write it to reward_train.output_path. Called on every rank."""
    config = training_config(config)

    def build(topology: Topology) -> dict[str, Engine]:
        role = _reward_engine(config.reward_train.kind)
        policy = config.policy
        engine = Engine(
            role,
            policy.path,
            parallel=config.parallel,
            topology=topology,
            optimizer=config.reward_train.optimizer,
            init=policy.init,
            dtype=policy.dtype,
            recompute=policy.recompute,
            vision=policy.vision,
            megatron=policy.megatron,
            seed=config.run.seed,
        )
        return {role: engine}

    with trainer_ranks(config, build) as group:
        if group is not None:
            kind = build_kind(config, Tokenizer(config.policy.path))
            examples, notes = load_examples(config, kind, "reward-train")
            for note in notes:
                print(f"reward-train: {note}")
            history = write_trained(config, group, kind, examples, "reward-train")
            _write_record(config, examples, history)


def write_trained(
    config: Config, group: TrainerGroup, kind: ExampleTrainer, examples: Sequence[Sequence[RewardExample]], command: str
) -> History:
    """Run num_steps updates in a seeded order of epochs, then export to output_path; returns the metrics of every step.

    ``examples``: to train on, and held out (may be empty). The section of ``command`` has the settings.
    """
    settings, console, (train, held_out) = _settings(config, command), Console(), examples
    batches = epoch_batches(len(train), settings.batch_size, config.run.seed)
    history: History = []
    if held_out:
        history.append(
            {"step": 0, **_report(console, f"{command} step 0 held out, before training", _evaluate(kind, group, held_out))}
        )
    with progress_bar(command, settings.num_steps, console=console) as advance:
        for step in range(1, settings.num_steps + 1):
            result, metrics = kind.update(group, [train[i] for i in next(batches)])
            if result.skipped:
                raise UserError(
                    f"{command}: the gradient of step {step} is not finite; "
                    f"lower {_section(command)}.optimizer.lr={result.lr:g}"
                )
            advance(note=f"loss {metrics['loss']:.4f}")
            row = {"step": step, "lr": result.lr, "grad_norm": result.grad_norm, **_prefixed("train", metrics)}
            last = step == settings.num_steps
            # On a terminal the progress bar shows the same numbers.
            if not console.is_terminal and (step % _PRINT_EVERY_STEPS == 0 or step == 1 or last):
                _report(console, f"{command} step {step} of {settings.num_steps}", metrics)
            if held_out and (last or is_due(step, settings.eval_every_steps)):
                row |= _report(console, f"{command} step {step} held out", _evaluate(kind, group, held_out))
            history.append(row)
    group.save_hf(kind.engine, settings.output_path)
    console.print(f"{command}: wrote {settings.output_path}")
    return history


def load_examples(config: Config, kind: ExampleTrainer, command: str) -> tuple[list[list[RewardExample]], list[str]]:
    """Examples of train_files and of eval_files with at most max_tokens, and notes on the others.

    The section of ``command`` has the files. Raises DataError for files without such examples.
    """
    settings = _settings(config, command)
    parts: list[list[RewardExample]] = []
    notes = []
    for files in (settings.train_files, settings.eval_files):
        examples = kind.examples(files) if files else []
        parts.append([example for example in examples if example.num_tokens <= settings.max_tokens])
        num_skipped = len(examples) - len(parts[-1])
        if files and not parts[-1]:
            raise DataError(
                f"{', '.join(files)}: none of {len(examples)} examples remain; all are longer than "
                f"{_section(command)}.max_tokens={settings.max_tokens} or have no labeled line"
            )
        if num_skipped:
            notes.append(f"{num_skipped} of {len(examples)} examples are longer than {settings.max_tokens} tokens and are skipped")
    return parts, notes


def _section(command: str) -> str:
    return command.replace("-", "_")


def _settings(config: Config, command: str) -> RewardTrainConfig | DpoConfig:
    return config.dpo if command == "dpo" else config.reward_train


def _evaluate(kind: ExampleTrainer, group: TrainerGroup, examples: Sequence[RewardExample]) -> dict[str, float]:
    """Metrics of ``kind`` over all examples, predicted in chunks."""
    starts = range(0, len(examples), _EVALUATION_CHUNK)
    parts = [kind.predict(group, examples[start : start + _EVALUATION_CHUNK]) for start in starts]
    return kind.metrics({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def _report(console: Console, title: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Print the metrics after ``title``; returns the metrics with the prefix ``eval/``."""
    values = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
    console.print(f"{title}: {values}", highlight=False, soft_wrap=True)
    return _prefixed("eval", metrics)


def _prefixed(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def _write_record(config: Config, examples: Sequence[Sequence[RewardExample]], history: History) -> None:
    """Write what the model learned from and how it must be asked, next to its weights."""
    settings = asdict(config.reward_train)
    num_train, num_eval = map(len, examples)
    record = {
        "kind": config.reward_train.kind.value,
        "num_train_examples": num_train,
        "num_eval_examples": num_eval,
        "seed": config.run.seed,
        "base_model": config.policy.path,
        "train_files": settings["train_files"],
        "eval_files": settings["eval_files"],
        "history": history,
    }
    if config.reward_train.kind is RewardModelKind.pairwise:
        record["judge"] = {
            "template": PAIRWISE_TEMPLATE,
            "yes_word": settings["yes_word"],
            "no_word": settings["no_word"],
            "use_chat_template": config.data.use_chat_template,
        }
    if config.reward_train.kind is RewardModelKind.bradley_terry:
        record["reward_model"] = {"use_chat_template": config.data.use_chat_template, "system_prompt": config.data.system_prompt}
        write_score_head(Path(config.reward_train.output_path))
    path = Path(config.reward_train.output_path) / _RECORD_FILE
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
