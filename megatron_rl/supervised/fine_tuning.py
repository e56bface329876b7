"""Supervised fine-tuning on reference responses: the warm start before reinforcement learning."""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from rich.console import Console

from megatron_rl.config.load import to_yaml_values
from megatron_rl.config.schema import Config
from megatron_rl.data.batch import PackedBatch, cu_seqlens_of
from megatron_rl.data.conversation_rows import TrainingSequence, load_sequences
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.vision import ImageProcessor
from megatron_rl.errors import UserError
from megatron_rl.parallel.topology import Topology
from megatron_rl.system.command_line.terminal import progress_bar
from megatron_rl.training.engine import Engine
from megatron_rl.training.trainer_group import TrainerGroup
from megatron_rl.training.trainer_ranks import build_engine, trainer_ranks

_NUM_RECENT = 10
"""Number of last steps whose mean loss is compared with ``sft.stop_at_loss``."""


def sft(config: Config) -> None:
    """Fine-tune the policy on reference responses and write a Hugging Face folder. Called on every rank."""

    def build(topology: Topology) -> dict[str, Engine]:
        return {"policy": build_engine(config, topology, "policy", config.policy, config.sft.optimizer)}

    with trainer_ranks(config, build) as group:
        if group is not None:
            _train(config, group)


def _train(config: Config, group: TrainerGroup) -> None:
    """Run sft.num_steps updates in a seeded order of epochs, then export the policy to sft.output_path.

    Updates end early once the mean of the newest losses is at most sft.stop_at_loss.
    """
    tokenizer = Tokenizer(config.policy.path)
    files = config.sft.train_files or config.data.train_files
    sequences, notes = load_sequences(files, config.data, tokenizer, turns=config.sft.train_turns)
    batches = epoch_batches(len(sequences), config.sft.batch_size, config.run.seed)
    console = Console()
    group.set_progress_callback(console.print)
    for note in (*group.notes, *notes):
        console.print(note, highlight=False, soft_wrap=True)
    with progress_bar("sft", config.sft.num_steps, console=console) as advance:
        recent: deque[float] = deque(maxlen=_NUM_RECENT)
        for step in range(1, config.sft.num_steps + 1):
            batch = sequence_batch([sequences[i] for i in next(batches)], tokenizer.vision)
            tokens = float(batch.fields["mask"].sum())
            result = group.update("policy", batch, objective="sft", denominators={"mask": tokens})
            if result.skipped:
                raise UserError(f"sft: the gradient of step {step} is not finite; lower sft.optimizer.lr={result.lr:g}")
            loss = result.metrics["lm_loss"][0] / result.metrics["lm_loss"][1]
            recent.append(loss)
            done = step == config.sft.num_steps or (
                len(recent) == _NUM_RECENT and mean(recent) <= config.sft.stop_at_loss
            )
            advance(note=f"loss {loss:.4f}")
            # On a terminal the progress bar shows the same numbers.
            if not console.is_terminal and (step % 25 == 0 or step == 1 or done):
                console.print(
                    f"sft step {step}/{config.sft.num_steps}  loss {loss:.4f}  grad norm {result.grad_norm:.2f}"
                )
            if done:
                break
    if step < config.sft.num_steps:
        console.print(
            f"sft: stopped after {step} of {config.sft.num_steps} steps: the mean loss of the last {_NUM_RECENT} is {mean(recent):.4f}, at "
            f"most sft.stop_at_loss={config.sft.stop_at_loss:g}",
            highlight=False,
            soft_wrap=True,
        )
    group.save_hf("policy", config.sft.output_path)
    record = to_yaml_values(config.sft) | {"base_model": config.policy.path, "train_files": files, "seed": config.run.seed}
    record |= {"num_sequences": len(sequences), "history": [{"step": step, "train/loss": mean(recent)}]}
    (Path(config.sft.output_path) / "sft_training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    console.print(f"sft: wrote {config.sft.output_path}")


def sequence_batch(sequences: Sequence[TrainingSequence], vision: ImageProcessor | None = None) -> PackedBatch:
    """Packed batch of the sequences; the mask selects their trained tokens. ``vision`` loads the images."""
    tokens = torch.tensor([token for sequence in sequences for token in sequence.token_ids], dtype=torch.int64)
    lengths = torch.tensor([len(sequence.token_ids) for sequence in sequences], dtype=torch.int64)
    mask = torch.from_numpy(np.concatenate([sequence.mask for sequence in sequences]))
    # The first token of a sequence has no log-prob.
    mask[cu_seqlens_of(lengths)[:-1]] = False
    images = None if vision is None else vision.batch([sequence.images for sequence in sequences])
    return PackedBatch(tokens, cu_seqlens_of(lengths), {"mask": mask}, images)


def epoch_batches(num_rows: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """Yield batches of row indices forever, each epoch in its own seeded order.

    A batch contains rows of one epoch only. With fewer rows than ``batch_size``, every batch is a whole epoch; otherwise
    an epoch's incomplete last batch is dropped.
    """
    generator = np.random.default_rng(seed)
    while True:
        order = generator.permutation(num_rows)
        # max(1, ...), so that fewer rows than ``batch_size`` still give a batch.
        for start in range(0, max(1, num_rows - batch_size + 1), batch_size):
            yield order[start : start + batch_size].tolist()
