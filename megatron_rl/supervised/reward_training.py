"""`megatron-rl reward-train`: trains reward models on preferences or line labels. Three kinds share one loop.

The kinds with a value head write critics, which critic.path and reward.process.path accept directly.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from rich.console import Console

from megatron_rl.config.derived import is_due
from megatron_rl.config.schema import Config, RewardModelKind
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.errors import DataError, UserError
from megatron_rl.parallel.topology import Topology
from megatron_rl.rewards.judges.templates import PAIRWISE_TEMPLATE
from megatron_rl.supervised.fine_tuning import epoch_batches
from megatron_rl.supervised.reward_models import RewardExample, RewardModelTrainer, build_kind
from megatron_rl.system.command_line.terminal import progress_bar
from megatron_rl.training.engine import Engine
from megatron_rl.training.trainer_group import TrainerGroup
from megatron_rl.training.trainer_ranks import trainer_ranks

_RECORD_FILE = "reward_training.json"
"""File in the output folder with the model's kind, data and training history."""
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
            _run_reward_training(config, group)


def _run_reward_training(config: Config, group: TrainerGroup) -> None:
    """Run reward_train.num_steps updates in a seeded order of epochs, then export to reward_train.output_path."""
    settings = config.reward_train
    tokenizer, console = Tokenizer(config.policy.path), Console()
    kind = build_kind(config, tokenizer)
    parts: list[list[RewardExample]] = []
    for files in (settings.train_files, settings.eval_files):
        examples, note = fitting_examples(config, tokenizer, files) if files else ([], "")
        parts.append(examples)
        if note:
            console.print(f"reward-train: {note}")
    train, held_out = parts
    batches = epoch_batches(len(train), settings.batch_size, config.run.seed)
    history: list[dict[str, float]] = []
    if held_out:
        history.append(
            {"step": 0, **_report(console, 0, "held out, before training", _evaluate(kind, group, held_out))}
        )
    with progress_bar("reward-train", settings.num_steps, console=console) as advance:
        for step in range(1, settings.num_steps + 1):
            result, metrics = kind.update(group, [train[i] for i in next(batches)])
            if result.skipped:
                raise UserError(
                    f"reward-train: the gradient of step {step} is not finite; "
                    f"lower reward_train.optimizer.lr={result.lr:g}"
                )
            advance(note=f"loss {metrics['loss']:.4f}")
            row = {"step": step, "lr": result.lr, "grad_norm": result.grad_norm, **_prefixed("train", metrics)}
            last = step == settings.num_steps
            # On a terminal the progress bar shows the same numbers.
            if not console.is_terminal and (step % _PRINT_EVERY_STEPS == 0 or step == 1 or last):
                _report(console, step, f"of {settings.num_steps}", metrics)
            if held_out and (last or is_due(step, settings.eval_every_steps)):
                row |= _report(console, step, "held out", _evaluate(kind, group, held_out))
            history.append(row)
    group.save_hf(kind.engine, settings.output_path)
    _write_record(config, len(train), len(held_out), history)
    console.print(f"reward-train: wrote {settings.output_path} ({settings.kind.value})")


def fitting_examples(config: Config, tokenizer: Tokenizer, files: Sequence[str]) -> tuple[list[RewardExample], str]:
    """Return the examples with at most reward_train.max_tokens, and a note on the others. Raises DataError if none remain."""
    limit = config.reward_train.max_tokens
    examples = build_kind(config, tokenizer).examples(files)
    fitting = [example for example in examples if example.num_tokens <= limit]
    if not fitting:
        raise DataError(
            f"{', '.join(files)}: none of {len(examples)} examples remain; all are longer than "
            f"reward_train.max_tokens={limit} or have no labeled line"
        )
    num_skipped = len(examples) - len(fitting)
    note = f"{num_skipped} of {len(examples)} examples are longer than {limit} tokens and are skipped"
    return fitting, note if num_skipped else ""


def _evaluate(kind: RewardModelTrainer, group: TrainerGroup, examples: Sequence[RewardExample]) -> dict[str, float]:
    """Metrics of ``kind`` over all examples, predicted in chunks."""
    starts = range(0, len(examples), _EVALUATION_CHUNK)
    parts = [kind.predict(group, examples[start : start + _EVALUATION_CHUNK]) for start in starts]
    return kind.metrics({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def _report(console: Console, step: int, what: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Print the metrics with the step and ``what``, such as "held out"; returns the metrics with the prefix ``eval/``."""
    values = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
    console.print(f"reward-train step {step} {what}: {values}", highlight=False, soft_wrap=True)
    return _prefixed("eval", metrics)


def _prefixed(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def _write_record(config: Config, num_train: int, num_eval: int, history: Sequence[Mapping[str, float]]) -> None:
    settings = asdict(config.reward_train)
    record = {
        "kind": config.reward_train.kind.value,
        "num_train_examples": num_train,
        "num_eval_examples": num_eval,
        "seed": config.run.seed,
        "base_model": config.policy.path,
        "train_files": settings["train_files"],
        "eval_files": settings["eval_files"],
        "history": list(history),
    }
    if config.reward_train.kind is RewardModelKind.pairwise:
        record["judge"] = {
            "template": PAIRWISE_TEMPLATE,
            "yes_word": settings["yes_word"],
            "no_word": settings["no_word"],
            "use_chat_template": config.data.use_chat_template,
        }
    path = Path(config.reward_train.output_path) / _RECORD_FILE
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
