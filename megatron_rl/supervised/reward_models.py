"""The three kinds of reward models: their examples, their updates and their metrics.

Every example becomes token sequences; a step is one update on a batch of examples.

- bradley_terry: a value head scores whole responses; -log sigmoid(s_chosen - s_rejected). The scores of a batch are
  computed first, without gradient. Each score's coefficient then enters the objective "score", so the two responses of
  a pair may be in different micro-batches and on different ranks.
- pairwise: the language model judges two responses with one word (the pairwise generative reward model of Seed1.5-VL,
  arXiv 2505.07062). Every pair is used in both orders, so a response's position carries no information; only the
  judgment token is trained.
- process: the value after each line of a program is regressed to the line's label (PRLCoder's +1 and -1); neutral lines
  are not trained.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from megatron_rl import algorithms
from megatron_rl.config.schema import Config, DataConfig, RewardModelKind
from megatron_rl.data.batch import PackedBatch, cu_seqlens_of
from megatron_rl.data.code_lines import code_lines, end_tokens, token_texts
from megatron_rl.data.images import ImageRef
from megatron_rl.data.preferences import load_labelled_programs, load_preferences
from megatron_rl.data.prompts import RowContent, encode_response, tokenize
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import Prompt
from megatron_rl.data.vision import ImageProcessor
from megatron_rl.errors import DataError, UserError
from megatron_rl.rewards.judges.pairwise import training_texts
from megatron_rl.rewards.judges.templates import word_token
from megatron_rl.training.engine import UpdateResult
from megatron_rl.training.trainer_group import TrainerGroup

Ids = tuple[int, ...]
Predictions = dict[str, np.ndarray]
"""Maps names to arrays with one value per example (or per line); arrays of chunks are concatenated."""


@dataclass(frozen=True)
class RewardExample:
    sequences: tuple[Ids, ...]
    """Sequences of token ids; each starts with the prompt."""
    labels: Mapping[int, int]
    """Maps positions in the (only) sequence to the label of the line that ends there; empty except for ``process``."""
    images: tuple[ImageRef, ...] = ()
    """Images of the prompt."""
    num_prompt_tokens: int = 0
    """Number of tokens of the prompt in each sequence, for DPO."""

    @property
    def num_tokens(self) -> int:
        return max(map(len, self.sequences))


class ExampleTrainer(Protocol):
    """Interface of one kind of reward model, or of DPO: creates examples, trains on them, and computes metrics."""

    engine: str
    """"critic" (value head) or "policy" (language-model head)."""

    def examples(self, files: Sequence[str]) -> list[RewardExample]: ...

    def update(self, group: TrainerGroup, examples: Sequence[RewardExample]) -> tuple[UpdateResult, dict[str, float]]:
        """Run one update; returns its result and the metrics of the batch before the update."""

    def predict(self, group: TrainerGroup, examples: Sequence[RewardExample]) -> Predictions: ...

    def metrics(self, predictions: Predictions) -> dict[str, float]: ...


def build_kind(config: Config, tokenizer: Tokenizer) -> ExampleTrainer:
    kinds: dict[RewardModelKind, Callable[[Config, Tokenizer], ExampleTrainer]] = {
        RewardModelKind.bradley_terry: BradleyTerry,
        RewardModelKind.pairwise: Pairwise,
        RewardModelKind.process: _ProcessLabels,
    }
    return kinds[config.reward_train.kind](config, tokenizer)


class BradleyTerry:
    """Scores a response by the value after its last token, the end-of-text token."""

    engine = "critic"

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self._data, self._tokenizer = config.data, tokenizer

    def examples(self, files: Sequence[str]) -> list[RewardExample]:
        return pair_examples(files, self._data, self._tokenizer)

    def update(self, group: TrainerGroup, examples: Sequence[RewardExample]) -> tuple[UpdateResult, dict[str, float]]:
        batch = example_batch(examples, self._tokenizer.vision)
        # Two passes, because a score's gradient depends on the other score of its pair, which may be on another rank.
        predictions = self._scores(group, batch)
        pair_coefs = algorithms.bradley_terry_coefficients(*map(torch.from_numpy, predictions.values()))
        coefs = torch.stack(pair_coefs, dim=1).flatten() / len(examples)
        batch = batch.with_fields(score_coefs=on_last_tokens(batch, coefs))
        return group.update("critic", batch, objective="score", denominators={}), self.metrics(predictions)

    def predict(self, group: TrainerGroup, examples: Sequence[RewardExample]) -> Predictions:
        return self._scores(group, example_batch(examples, self._tokenizer.vision))

    def _scores(self, group: TrainerGroup, batch: PackedBatch) -> Predictions:
        _, scores = group.values(batch)
        chosen, rejected = scores.view(-1, 2).double().unbind(1)
        return {"chosen": chosen.numpy(), "rejected": rejected.numpy()}

    def metrics(self, predictions: Predictions) -> dict[str, float]:
        loss = algorithms.bradley_terry_loss(*map(torch.from_numpy, predictions.values()))
        return {"loss": float(loss.sum / loss.denominator), **means(loss.metrics)}


class Pairwise:
    """Judge model that answers YES or NO to the question whether the first response is better than the second."""

    engine = "policy"

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        settings = config.reward_train
        self._data, self._tokenizer = config.data, tokenizer
        self._yes, self._no = (word_token(tokenizer.encode, word) for word in (settings.yes_word, settings.no_word))
        if self._yes == self._no:
            raise UserError("reward_train.yes_word and no_word are the same token; the judge needs two words")

    def examples(self, files: Sequence[str]) -> list[RewardExample]:
        """Examples with both orders, each followed by the correct word: (chosen first: YES, chosen second: NO).

        As when the judge is used, responses are solutions without thoughts and control tokens.
        """
        examples = []
        for row in load_preferences(files, self._data):
            texts = training_texts(
                row.content.text,
                row.chosen,
                row.rejected,
                place=row.content.place,
                tokenizer_path=str(self._tokenizer.path),
            )
            words = (self._yes, self._no)
            # Text only, because the judge later gets the text only.
            content = replace(row.content, images=(), chat_arguments={})
            examples.append(
                RewardExample(
                    tuple(
                        (*tokenize(replace(content, prompt=text), self._data, self._tokenizer).token_ids, word)
                        for text, word in zip(texts, words, strict=True)
                    ),
                    {},
                )
            )
        return examples

    def update(self, group: TrainerGroup, examples: Sequence[RewardExample]) -> tuple[UpdateResult, dict[str, float]]:
        batch = packed([sequence for example in examples for sequence in example.sequences])
        batch = batch.with_fields(mask=on_last_tokens(batch, torch.ones(batch.num_sequences)) != 0)
        result = group.update("policy", batch, objective="sft", denominators={"mask": float(batch.num_sequences)})
        total, count = result.metrics["lm_loss"]
        return result, {"loss": total / count}

    def predict(self, group: TrainerGroup, examples: Sequence[RewardExample]) -> Predictions:
        """P(first text is better) per pair: ``chosen_first`` with the chosen response as first text, ``chosen_second`` as second.

        A perfect judge gives 1 and 0. ``mass``: mean of P(YES) + P(NO) over both orders; 1 if the judge follows the format.
        """
        logprobs = {}
        for name, word in (("yes", self._yes), ("no", self._no)):
            batch = packed([(*sequence[:-1], word) for example in examples for sequence in example.sequences])
            batch = batch.with_fields(mask=on_last_tokens(batch, torch.ones(batch.num_sequences)) != 0)
            token_logprobs = group.logprobs(batch, temperature=1.0)
            logprobs[name] = token_logprobs[batch.cu_seqlens[1:] - 1].double().view(-1, 2)
        first = torch.sigmoid(logprobs["yes"] - logprobs["no"])
        mass = (logprobs["yes"].exp() + logprobs["no"].exp()).mean(dim=1)
        return {"chosen_first": first[:, 0].numpy(), "chosen_second": first[:, 1].numpy(), "mass": mass.numpy()}

    def metrics(self, predictions: Predictions) -> dict[str, float]:
        first, second = (torch.from_numpy(predictions[name]) for name in ("chosen_first", "chosen_second"))
        scores = torch.as_tensor(algorithms.pairwise_score(first, second))
        # The log of a saturated probability (0) would make the loss infinite.
        tiny = torch.finfo(torch.float64).tiny
        return {
            "loss": -0.5 * float((first.clamp(min=tiny).log() + (1.0 - second).clamp(min=tiny).log()).mean()),
            "accuracy": float((torch.sign(scores - 0.5) / 2 + 0.5).mean()),
            "accuracy_chosen_first": float((first > 0.5).double().mean()),
            "accuracy_chosen_second": float((second < 0.5).double().mean()),
            "margin": float((2.0 * scores - 1.0).mean()),
            **means(algorithms.swap_consistency(first, second)),
            "judgement_mass": float(predictions["mass"].mean()),
        }


class _ProcessLabels:
    """Scores a line by the value after the token that ends the line."""

    engine = "critic"

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self._data, self._tokenizer = config.data, tokenizer

    def examples(self, files: Sequence[str]) -> list[RewardExample]:
        """Examples of one sequence each; rows with neutral lines only are skipped."""
        examples = []
        for row in load_labelled_programs(files, self._data):
            prompt = tokenize(row.content, self._data, self._tokenizer)
            num_prompt = len(prompt.token_ids)
            sequence = _with_response(row.content, prompt, row.response, self._tokenizer)
            texts = token_texts(sequence[num_prompt:-1], self._tokenizer.decode)
            lines = code_lines("".join(texts), entry_point=row.entry_point)
            if len(lines) != len(row.labels):
                raise DataError(
                    f"{row.content.place}: the tokenizer turns a program of {len(row.labels)} lines into {len(lines)} lines; "
                    "it must keep line ends"
                )
            # + 1, because values[t] is the value before token t: the value after a line belongs to the next token.
            labels = {
                num_prompt + token + 1: label
                for token, label in zip(end_tokens(lines, texts), row.labels, strict=True)
                if label
            }
            if labels:
                examples.append(RewardExample((sequence,), labels, prompt.images))
        return examples

    def update(self, group: TrainerGroup, examples: Sequence[RewardExample]) -> tuple[UpdateResult, dict[str, float]]:
        batch = self._batch(examples)
        count = float(batch.fields["mask"].sum())
        result = group.update("critic", batch, objective="critic", denominators={"mask": count})
        return result, {"loss": result.metrics["squared_error"][0] / result.metrics["squared_error"][1]}

    def predict(self, group: TrainerGroup, examples: Sequence[RewardExample]) -> Predictions:
        batch = self._batch(examples)
        values, _ = group.values(batch)
        mask = batch.fields["mask"]
        return {"values": values[mask].double().numpy(), "labels": batch.fields["returns"][mask].double().numpy()}

    def _batch(self, examples: Sequence[RewardExample]) -> PackedBatch:
        batch = example_batch(examples, self._tokenizer.vision)
        labels = torch.zeros(len(batch.tokens))
        for start, example in zip(batch.cu_seqlens[:-1].tolist(), examples, strict=True):
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


def pair_examples(files: Sequence[str], data: DataConfig, tokenizer: Tokenizer) -> list[RewardExample]:
    """Examples with the sequences (prompt + chosen, prompt + rejected)."""
    examples = []
    for row in load_preferences(files, data):
        prompt = tokenize(row.content, data, tokenizer)
        pair = (_with_response(row.content, prompt, text, tokenizer) for text in (row.chosen, row.rejected))
        examples.append(RewardExample(tuple(pair), {}, prompt.images, len(prompt.token_ids)))
    return examples


def means(metrics: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> dict[str, float]:
    return {name: float(total / count) for name, (total, count) in metrics.items()}


def packed(sequences: Sequence[Ids]) -> PackedBatch:
    tokens = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int64)
    return PackedBatch(tokens, cu_seqlens_of(torch.tensor([len(sequence) for sequence in sequences])))


def example_batch(examples: Sequence[RewardExample], vision: ImageProcessor | None) -> PackedBatch:
    """Packed batch of all sequences of the examples, each with its prompt's images."""
    batch = packed([sequence for example in examples for sequence in example.sequences])
    if vision is None:
        return batch
    images = vision.batch([example.images for example in examples for _ in example.sequences])
    return replace(batch, images=images)


def on_last_tokens(batch: PackedBatch, values: torch.Tensor) -> torch.Tensor:
    """[T] float32: ``values`` [N] on the last token of each sequence, 0 elsewhere."""
    field = torch.zeros(len(batch.tokens))
    field[batch.cu_seqlens[1:] - 1] = values.to(field)
    return field


def _with_response(content: RowContent, prompt: Prompt, response: str, tokenizer: Tokenizer) -> Ids:
    unknown = tokenizer.unknown_text(response)
    if unknown:
        raise DataError(f"{content.place}: a response contains {unknown!r}, unknown to the tokenizer; clean the data")
    return (*prompt.token_ids, *encode_response(response, content.place, "response", tokenizer), tokenizer.eos_id)


