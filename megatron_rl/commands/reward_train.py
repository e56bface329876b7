"""`megatron-rl reward-train`: reward models from preferences or line labels, on Megatron.

Three kinds, one loop. Every example becomes token sequences; a step is one optimizer step on a batch of examples.

- bradley_terry: a value head scores whole responses; -log sigmoid(s_chosen - s_rejected). The scores of a batch are
  computed first, without gradient; what each of them contributes then goes through the objective "score", so the two
  responses of a pair may lie in different micro-batches and ranks.
- pairwise: the language model judges two responses with one word (papers 6.2). Every pair is seen in both orders, so the
  place of a response says nothing; only the judgement token is learned.
- process: the value after each line of a program is regressed to its label (papers 9.2); neutral lines train nothing.

The value-head kinds write critics: critic.path and reward.process.path take them as they are.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from rich.console import Console

from megatron_rl import algorithms
from megatron_rl.commands.sft import epoch_batches
from megatron_rl.config.schema import Config, RewardModelKind
from megatron_rl.data.batch import PackedBatch, cu_seqlens_of
from megatron_rl.data.code_lines import code_lines, end_tokens, token_texts
from megatron_rl.data.images import ImageRef
from megatron_rl.data.preferences import load_labelled_programs, load_preferences
from megatron_rl.data.prompts import RowContent, encode_response, tokenize
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import Prompt
from megatron_rl.data.vision import Vision
from megatron_rl.errors import DataError, UserError
from megatron_rl.parallel.topology import Topology
from megatron_rl.rewards.judges.templates import PAIRWISE_TEMPLATE, render_pairwise, word_token
from megatron_rl.system.progress import progress_bar
from megatron_rl.training.engine import Engine, UpdateResult
from megatron_rl.training.trainer_group import TrainerGroup

_RECORD_FILE = "reward_training.json"
"""Beside the weights: what the model is and how its training went."""
_PRINT_EVERY_STEPS = 25
_EVALUATION_CHUNK = 256
"""Examples predicted at a time."""

Ids = tuple[int, ...]
Predictions = dict[str, np.ndarray]
"""Name -> one number an example (or a line); chunks are put end to end."""


@dataclass(frozen=True)
class Example:
    sequences: tuple[Ids, ...]
    """Token ids, each beginning with a prompt."""
    labels: Mapping[int, int]
    """Position in the (only) sequence -> label of the line that ends there; empty but for ``process``."""
    images: tuple[ImageRef, ...] = ()
    """Of the prompt that all sequences begin with."""

    @property
    def num_tokens(self) -> int:
        return max(map(len, self.sequences))


class Kind(Protocol):
    """How one kind of reward model makes examples, learns from them and is measured."""

    engine: str
    """"critic" (value head) or "policy" (language-model head)."""

    def examples(self, files: Sequence[str]) -> list[Example]: ...

    def update(self, group: TrainerGroup, examples: Sequence[Example]) -> tuple[UpdateResult, dict[str, float]]:
        """One optimizer step; metrics from before it."""

    def predict(self, group: TrainerGroup, examples: Sequence[Example]) -> Predictions: ...

    def metrics(self, predictions: Predictions) -> dict[str, float]: ...


def _reward_engine(kind: RewardModelKind) -> str:
    """Name and role of the engine that a kind trains."""
    return "policy" if kind is RewardModelKind.pairwise else "critic"


def training_config(config: Config) -> Config:
    """The configuration of the ranks: values are regressed without PPO's clip."""
    return replace(config, algorithm=replace(config.algorithm, value_clip_low=0.0, value_clip_high=0.0))


def reward_train(config: Config) -> None:
    """Every rank calls it: trains the reward model and writes it to reward_train.output_path."""
    from megatron_rl.training.ranks import trainer_ranks

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
            seed=config.run.seed,
        )
        return {role: engine}

    with trainer_ranks(config, build) as group:
        if group is not None:
            _run_reward_training(config, group)


def _run_reward_training(config: Config, group: TrainerGroup) -> None:
    """reward_train.num_steps optimizer steps in a seeded order of epochs; then the model in reward_train.output_path."""
    settings = config.reward_train
    kind = build_kind(config, Tokenizer(config.policy.path))
    console = Console()
    train = _fitting(kind, settings.train_files, config, console)
    held_out = _fitting(kind, settings.eval_files, config, console) if settings.eval_files else []
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
            row = {"step": step, "lr": result.lr, "grad_norm": result.grad_norm, **_named("train", metrics)}
            last = step == settings.num_steps
            if not console.is_terminal and (step % _PRINT_EVERY_STEPS == 0 or step == 1 or last):
                _report(console, step, f"of {settings.num_steps}", metrics)
            if held_out and (last or (settings.eval_every_steps and step % settings.eval_every_steps == 0)):
                row |= _report(console, step, "held out", _evaluate(kind, group, held_out))
            history.append(row)
    group.save_hf(kind.engine, settings.output_path)
    _write_record(config, len(train), len(held_out), history)
    console.print(f"reward-train: wrote {settings.output_path} ({settings.kind.value})")


def build_kind(config: Config, tokenizer: Tokenizer) -> Kind:
    return {
        RewardModelKind.bradley_terry: BradleyTerry,
        RewardModelKind.pairwise: Pairwise,
        RewardModelKind.process: _ProcessLabels,
    }[config.reward_train.kind](config, tokenizer)


class BradleyTerry:
    """The score of a response is the value after its last token, which is the end-of-text token."""

    engine = "critic"

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self._data, self._tokenizer = config.data, tokenizer

    def examples(self, files: Sequence[str]) -> list[Example]:
        """Sequences: (prompt + chosen, prompt + rejected)."""
        return [
            Example(
                tuple(_with_response(row.content, prompt, text, self._tokenizer) for text in (row.chosen, row.rejected)),
                {},
                prompt.images,
            )
            for row in load_preferences(files, self._data)
            for prompt in [tokenize(row.content, self._data, self._tokenizer)]
        ]

    def update(self, group: TrainerGroup, examples: Sequence[Example]) -> tuple[UpdateResult, dict[str, float]]:
        batch = example_batch(examples, self._tokenizer.vision)
        predictions = self._scores(group, batch)
        coefs = algorithms.bradley_terry_coefficients(*map(torch.from_numpy, predictions.values()))
        coefs = torch.stack(coefs, dim=1).flatten() / len(examples)
        batch = batch.with_fields(score_coefs=on_last_tokens(batch, coefs))
        return group.update("critic", batch, objective="score", denominators={}), self.metrics(predictions)

    def predict(self, group: TrainerGroup, examples: Sequence[Example]) -> Predictions:
        return self._scores(group, example_batch(examples, self._tokenizer.vision))

    def _scores(self, group: TrainerGroup, batch: PackedBatch) -> Predictions:
        _, scores = group.values(batch)
        chosen, rejected = scores.view(-1, 2).double().unbind(1)
        return {"chosen": chosen.numpy(), "rejected": rejected.numpy()}

    def metrics(self, predictions: Predictions) -> dict[str, float]:
        loss = algorithms.bradley_terry_loss(*map(torch.from_numpy, predictions.values()))
        return {"loss": float(loss.sum / loss.denominator), **_means(loss.metrics)}


class Pairwise:
    """A judge that answers YES or NO to: is the first response better than the second one?"""

    engine = "policy"

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        settings = config.reward_train
        self._data, self._tokenizer = config.data, tokenizer
        self._yes, self._no = (word_token(tokenizer.encode, word) for word in (settings.yes_word, settings.no_word))
        if self._yes == self._no:
            raise UserError("reward_train.yes_word and no_word are the same token; the judge needs two words")

    def examples(self, files: Sequence[str]) -> list[Example]:
        """Sequences: both orders, each with the right word: (chosen first: YES, chosen second: NO)."""
        examples = []
        for row in load_preferences(files, self._data):
            prompt = row.content.text
            texts = (
                render_pairwise(prompt, row.chosen, row.rejected),
                render_pairwise(prompt, row.rejected, row.chosen),
            )
            words = (self._yes, self._no)
            examples.append(
                Example(
                    tuple(
                        (*tokenize(replace(row.content, prompt=text, images=()), self._data, self._tokenizer).token_ids, word)
                        for text, word in zip(texts, words)
                    ),
                    {},
                )
            )
        return examples

    def update(self, group: TrainerGroup, examples: Sequence[Example]) -> tuple[UpdateResult, dict[str, float]]:
        batch = packed([sequence for example in examples for sequence in example.sequences])
        batch = batch.with_fields(mask=on_last_tokens(batch, torch.ones(batch.num_sequences)) != 0)
        result = group.update("policy", batch, objective="sft", denominators={"mask": float(batch.num_sequences)})
        total, count = result.metrics["lm_loss"]
        return result, {"loss": total / count}

    def predict(self, group: TrainerGroup, examples: Sequence[Example]) -> Predictions:
        """p(first is better) when the chosen response stands first, and when it stands second."""
        logprobs = {}
        for name, word in (("yes", self._yes), ("no", self._no)):
            batch = packed([(*sequence[:-1], word) for example in examples for sequence in example.sequences])
            batch = batch.with_fields(mask=on_last_tokens(batch, torch.ones(batch.num_sequences)) != 0)
            answer = group.logprobs(batch, temperature=1.0)
            logprobs[name] = answer[batch.cu_seqlens[1:] - 1].double().view(-1, 2)
        first = torch.sigmoid(logprobs["yes"] - logprobs["no"])
        mass = (logprobs["yes"].exp() + logprobs["no"].exp()).mean(dim=1)
        return {"chosen_first": first[:, 0].numpy(), "chosen_second": first[:, 1].numpy(), "mass": mass.numpy()}

    def metrics(self, predictions: Predictions) -> dict[str, float]:
        first, second = (torch.from_numpy(predictions[name]) for name in ("chosen_first", "chosen_second"))
        scores = algorithms.pairwise_score(first, second)
        tiny = torch.finfo(torch.float64).tiny
        return {
            "loss": -0.5 * float((first.clamp(min=tiny).log() + (1.0 - second).clamp(min=tiny).log()).mean()),
            "accuracy": float((torch.sign(scores - 0.5) / 2 + 0.5).mean()),
            "accuracy_chosen_first": float((first > 0.5).double().mean()),
            "accuracy_chosen_second": float((second < 0.5).double().mean()),
            "margin": float((2.0 * scores - 1.0).mean()),
            **_means(algorithms.swap_consistency(first, second)),
            "judgement_mass": float(predictions["mass"].mean()),
        }


class _ProcessLabels:
    """The value read after the token that ends a line is the line's score."""

    engine = "critic"

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self._data, self._tokenizer = config.data, tokenizer
        self._comment_prefixes = config.reward.process.comment_prefixes

    def examples(self, files: Sequence[str]) -> list[Example]:
        """One sequence each; rows whose lines are all neutral have nothing to teach and are left out."""
        examples = []
        for row in load_labelled_programs(files, self._data, self._comment_prefixes):
            prompt = tokenize(row.content, self._data, self._tokenizer)
            num_prompt = len(prompt.token_ids)
            sequence = _with_response(row.content, prompt, row.response, self._tokenizer)
            pieces = token_texts(sequence[num_prompt:-1], self._tokenizer.decode)
            lines = code_lines("".join(pieces), entry_point=row.entry_point, comment_prefixes=self._comment_prefixes)
            if len(lines) != len(row.labels):
                raise DataError(
                    f"{row.content.place}: the tokenizer turns a program of {len(row.labels)} lines into one of "
                    f"{len(lines)}; it must keep line ends"
                )
            # values[t] is read before token t: the value after a line is the one before the next token.
            labels = {
                num_prompt + token + 1: label
                for token, label in zip(end_tokens(lines, pieces), row.labels, strict=True)
                if label
            }
            if labels:
                examples.append(Example((sequence,), labels, prompt.images))
        return examples

    def update(self, group: TrainerGroup, examples: Sequence[Example]) -> tuple[UpdateResult, dict[str, float]]:
        batch = self._batch(examples)
        count = float(batch.fields["mask"].sum())
        result = group.update("critic", batch, objective="critic", denominators={"mask": count})
        return result, {"loss": result.metrics["squared_error"][0] / result.metrics["squared_error"][1]}

    def predict(self, group: TrainerGroup, examples: Sequence[Example]) -> Predictions:
        batch = self._batch(examples)
        values, _ = group.values(batch)
        mask = batch.fields["mask"]
        return {"values": values[mask].double().numpy(), "labels": batch.fields["returns"][mask].double().numpy()}

    def _batch(self, examples: Sequence[Example]) -> PackedBatch:
        batch = example_batch(examples, self._tokenizer.vision)
        labels = torch.zeros(len(batch.tokens))
        for start, example in zip(batch.cu_seqlens.tolist(), examples):
            for position, label in example.labels.items():
                labels[start + position] = label
        return batch.with_fields(mask=labels != 0, returns=labels, old_values=torch.zeros_like(labels))

    def metrics(self, predictions: Predictions) -> dict[str, float]:
        values, labels = predictions["values"], predictions["labels"]
        good, bad = values[labels > 0], values[labels < 0]
        metrics = {
            "loss": float(np.square(values - labels).mean()),
            "accuracy": float((np.sign(values) == labels).mean()),
            "good_share": float((labels > 0).mean()),
        }
        if len(good) and len(bad):
            metrics["margin"] = float(good.mean() - bad.mean())
        return metrics


def _means(metrics: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> dict[str, float]:
    return {name: float(total / count) for name, (total, count) in metrics.items()}


def packed(sequences: Sequence[Ids]) -> PackedBatch:
    tokens = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int64)
    return PackedBatch(tokens, cu_seqlens_of(torch.tensor([len(sequence) for sequence in sequences])))


def example_batch(examples: Sequence[Example], vision: Vision | None) -> PackedBatch:
    """All sequences of the examples, each with its prompt's images."""
    batch = packed([sequence for example in examples for sequence in example.sequences])
    if vision is None:
        return batch
    images = vision.batch([example.images for example in examples for _ in example.sequences])
    return replace(batch, images=images)


def on_last_tokens(batch: PackedBatch, numbers: torch.Tensor) -> torch.Tensor:
    """[T] float32: numbers [N] on the last token of each sequence, 0 elsewhere."""
    field = torch.zeros(len(batch.tokens))
    field[batch.cu_seqlens[1:] - 1] = numbers.to(field)
    return field


def _with_response(content: RowContent, prompt: Prompt, response: str, tokenizer: Tokenizer) -> Ids:
    unknown = tokenizer.unknown_text(response)
    if unknown:
        raise DataError(f"{content.place}: the tokenizer does not know {unknown!r} of a response; clean the data")
    return (*prompt.token_ids, *encode_response(response, content.place, "response", tokenizer), tokenizer.eos_id)


def _fitting(kind: Kind, files: Sequence[str], config: Config, console: Console) -> list[Example]:
    """The examples of at most reward_train.max_tokens; says how many were longer."""
    limit = config.reward_train.max_tokens
    examples = kind.examples(files)
    fitting = [example for example in examples if example.num_tokens <= limit]
    if not fitting:
        raise DataError(
            f"{', '.join(files)}: no example is left of {len(examples)}; all are longer than "
            f"reward_train.max_tokens={limit} or have no labelled line"
        )
    if len(fitting) < len(examples):
        console.print(
            f"reward-train: {len(examples) - len(fitting)} of {len(examples)} examples are longer than {limit} tokens "
            "and are left out"
        )
    return fitting


def _evaluate(kind: Kind, group: TrainerGroup, examples: Sequence[Example]) -> dict[str, float]:
    """Metrics over all examples."""
    starts = range(0, len(examples), _EVALUATION_CHUNK)
    parts = [kind.predict(group, examples[start : start + _EVALUATION_CHUNK]) for start in starts]
    return kind.metrics({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def _report(console: Console, step: int, what: str, metrics: Mapping[str, float]) -> dict[str, float]:
    numbers = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
    console.print(f"reward-train step {step} {what}: {numbers}", highlight=False, soft_wrap=True)
    return _named("eval", metrics)


def _named(place: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{place}/{name}": value for name, value in metrics.items()}


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
