"""Rows for `megatron-rl sft`: a prompt with its reference response, or a whole conversation, as sequences with a mask."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_rl.config.schema import DataConfig, TrainTurns
from megatron_rl.data.conversation_rows import TrainingSequence, encode_conversation, read_conversation
from megatron_rl.data.prompts import (
    check_images,
    encode_response,
    first_and_last,
    read_content,
    rows_of_each,
    text_field,
    tokenize,
)
from megatron_rl.data.row_files import Row, is_missing, lookup, read_rows
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.errors import DataError


def load_sequences(
    files: Sequence[str], data: DataConfig, tokenizer: Tokenizer, *, turns: TrainTurns = TrainTurns.all, all_rows: bool = True
) -> tuple[list[TrainingSequence], list[str]]:
    """Sequences of every row, or of the first and last rows (``first_and_last``), and notes on conversations."""
    sequences: list[TrainingSequence] = []
    notes: Counter[str] = Counter()
    num_conversations = 0
    rows = read_rows(files, split=data.split)
    for row, place in rows if all_rows else first_and_last(rows):
        if _has_messages(row, data):
            num_conversations += 1
            sequences += encode_conversation(read_conversation(row, place, data, turns), tokenizer, notes)
            continue
        prompt = tokenize(read_content(row, place, _without_reward(data)), data, tokenizer)
        text = text_field(row, data.response_field, place, "data.response_field")
        response = [*encode_response(text, place, data.response_field, tokenizer), tokenizer.eos_id]
        mask = np.arange(len(prompt.token_ids) + len(response)) >= len(prompt.token_ids)
        sequences.append(TrainingSequence([*prompt.token_ids, *response], mask, prompt.images))
    if not sequences:
        raise DataError(
            f"{', '.join(files)}: no rows; supervised training needs prompts with a {data.response_field!r} field, or "
            "conversations (data.messages_field)"
        )
    return sequences, [f"of {num_conversations:,} conversations: {count:,} {note}" for note, count in notes.items() if count]


def check_supervised_files(files: Sequence[str], data: DataConfig, *, takes_images: bool | None = None) -> int:
    """Check that every row has a response or a conversation, and readable images; returns the number of rows.

    Needs no tokenizer. Raises DataError as ``data.prompts.check_files``.
    """
    num_rows = 0
    for row, place in rows_of_each(files, data, ["messages_field"]):
        num_rows += 1
        if _has_messages(row, data):
            check_images(read_conversation(row, place, data, TrainTurns.all).content, takes_images=takes_images)
        else:
            check_images(read_content(row, place, _without_reward(data)), takes_images=takes_images)
            text_field(row, data.response_field, place, "data.response_field")
    return num_rows


def _has_messages(row: Row, data: DataConfig) -> bool:
    return bool(data.messages_field) and not is_missing(lookup(row, data.messages_field))


def _without_reward(data: DataConfig) -> DataConfig:
    """Settings under which a row needs no ground truth, because no reward reads it."""
    return replace(data, answer_required=False, reward_fields=[])
