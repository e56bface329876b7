"""`megatron-rl dpo`: direct preference optimization on pairs, with the loop of reward models.

The reference is the policy that training starts from: its log-probs of all pairs are computed once, before the first
update, and kept, so there is no second model in memory. A step scores its pairs first, without gradient. Each
response's coefficient then enters the objective "logprobs", so the two responses of a pair may be in different
micro-batches and on different ranks.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_rl import algorithms
from megatron_rl.algorithms.loss import Loss
from megatron_rl.algorithms.preference_losses import LogProbs
from megatron_rl.config.load import to_yaml_values
from megatron_rl.config.schema import Config
from megatron_rl.data.batch import PackedBatch
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.parallel.topology import Topology
from megatron_rl.supervised.reward_models import Predictions, RewardExample, example_batch, means, pair_examples
from megatron_rl.supervised.reward_training import load_examples, write_trained
from megatron_rl.training.engine import Engine, UpdateResult
from megatron_rl.training.trainer_group import TrainerGroup
from megatron_rl.training.trainer_ranks import build_engine, trainer_ranks

_REFERENCE_CHUNK = 256
"""Number of pairs per pass over the reference."""


def dpo(config: Config) -> None:
    """Train the policy on preferences and write it to dpo.output_path. Called on every rank."""

    def build(topology: Topology) -> dict[str, Engine]:
        return {"policy": build_engine(config, topology, "policy", config.policy, config.dpo.optimizer)}

    with trainer_ranks(config, build) as group:
        if group is not None:
            pairs = PreferencePairs(config, Tokenizer(config.policy.path))
            examples, notes = load_examples(config, pairs, "dpo")
            for note in (*group.notes, *notes):
                print(f"dpo: {note}")
            pairs.keep_reference(group, [example for part in examples for example in part])
            history = write_trained(config, group, pairs, examples, "dpo")
            record = to_yaml_values(config.dpo) | {"seed": config.run.seed, "base_model": config.policy.path, "history": history}
            path = Path(config.dpo.output_path) / "dpo_training.json"
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


class PreferencePairs:
    """Trains the policy's log-ratio of chosen above that of rejected; owns the reference's log-probs."""

    engine = "policy"

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self._settings, self._data, self._tokenizer = config.dpo, config.data, tokenizer
        self._reference: dict[tuple[tuple[int, ...], ...], Tensor] = {}
        """Maps the sequences of a pair to their log-probs [2] float64 under the reference."""

    def examples(self, files: Sequence[str]) -> list[RewardExample]:
        return pair_examples(files, self._data, self._tokenizer)

    def keep_reference(self, group: TrainerGroup, examples: Sequence[RewardExample]) -> None:
        """Compute the reference's log-probs of ``examples``; to be called before the first update."""
        for start in range(0, len(examples), _REFERENCE_CHUNK):
            chunk = examples[start : start + _REFERENCE_CHUNK]
            logprobs = _pair_logprobs(group, self._batch(chunk))
            self._reference |= {example.sequences: pair for example, pair in zip(chunk, logprobs, strict=True)}

    def update(self, group: TrainerGroup, examples: Sequence[RewardExample]) -> tuple[UpdateResult, dict[str, float]]:
        batch = self._batch(examples)
        predictions = self._predictions(group, batch, examples)
        loss, logprobs = self._loss(predictions)
        coefs = torch.stack(algorithms.dpo_coefficients(loss, logprobs), dim=1).flatten() / len(examples)
        token_coefs = coefs.float().repeat_interleave(batch.lengths) * batch.fields["mask"]
        batch = batch.with_fields(logprob_coefs=token_coefs)
        return group.update("policy", batch, objective="logprobs", denominators={}), self.metrics(predictions)

    def predict(self, group: TrainerGroup, examples: Sequence[RewardExample]) -> Predictions:
        return self._predictions(group, self._batch(examples), examples)

    def metrics(self, predictions: Predictions) -> dict[str, float]:
        loss, _ = self._loss(predictions)
        return {"loss": float(loss.sum.detach() / loss.denominator), **means(loss.metrics)}

    def _batch(self, examples: Sequence[RewardExample]) -> PackedBatch:
        """Both sequences of every pair, one after the other; the mask selects the responses."""
        batch = example_batch(examples, self._tokenizer.vision)
        num_prompt_tokens = torch.tensor([example.num_prompt_tokens for example in examples for _ in example.sequences])
        return batch.with_fields(mask=tail_mask(batch.lengths, batch.lengths - num_prompt_tokens))

    def _predictions(self, group: TrainerGroup, batch: PackedBatch, examples: Sequence[RewardExample]) -> Predictions:
        """[P, 2] arrays of the responses (chosen, rejected): log-probs, the reference's, and numbers of tokens."""
        return {
            "logprobs": _pair_logprobs(group, batch).numpy(),
            "reference": torch.stack([self._reference[example.sequences] for example in examples]).numpy(),
            "lengths": _sums_per_sequence(batch.fields["mask"].double(), batch).view(-1, 2).numpy(),
        }

    def _loss(self, predictions: Predictions) -> tuple[Loss, LogProbs]:
        """The loss, and the log-probs that it can be differentiated by."""
        chosen, rejected = _sides(predictions["logprobs"])
        logprobs = (chosen.requires_grad_(), rejected.requires_grad_())
        settings = self._settings
        loss = algorithms.dpo_loss(
            logprobs,
            _sides(predictions["reference"]),
            _sides(predictions["lengths"]),
            kind=settings.loss.value,
            beta=settings.beta,
            label_smoothing=settings.label_smoothing,
            length_normalized=settings.length_normalized,
        )
        return loss, logprobs


def tail_mask(lengths: Tensor, tails: Tensor) -> Tensor:
    """[T] bool: True on the last tails[n] tokens of each of N sequences with ``lengths`` [N]."""
    ends = lengths.cumsum(0).repeat_interleave(lengths)
    return torch.arange(int(lengths.sum())) >= ends - tails.repeat_interleave(lengths)


def _sides(pairs: np.ndarray) -> LogProbs:
    """The columns of ``pairs`` [P, 2], copied."""
    return torch.tensor(pairs[:, 0]), torch.tensor(pairs[:, 1])


def _pair_logprobs(group: TrainerGroup, batch: PackedBatch) -> Tensor:
    """[P, 2] float64: the policy's log-prob of each response."""
    return _sums_per_sequence(group.logprobs(batch, temperature=1.0).double(), batch).view(-1, 2)


def _sums_per_sequence(values: Tensor, batch: PackedBatch) -> Tensor:
    """[N] sums of ``values`` [T]."""
    indices = torch.repeat_interleave(torch.arange(batch.num_sequences), batch.lengths)
    return torch.zeros(batch.num_sequences, dtype=values.dtype).index_add_(0, indices, values)
