"""Rows for supervised training: prompts with responses, and conversations, as sequences with a mask of the trained tokens.

Rows have messages as OpenAI writes them (role, content, tool_calls, reasoning_content) or as ShareGPT does (from, value).
``weight: 0`` on a turn of the assistant masks it. A turn's mask is a difference of two texts of the chat template: the
messages with the turn, less the messages before it with the prompt for an answer. So the mask has what the model
generates, its closing token included, and needs no marks in the template.

Invariants: the tokens are those of a whole text, encoded once; every trained turn stands in exactly one sequence, after
the text that the model gets when it generates this turn. A template that changes earlier turns (Qwen3 drops their
thoughts) therefore makes several sequences of one row. A trained turn shows its answer and its tool calls; missing
thoughts, and all else that differs from generation, is counted in the notes.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.schema import DataConfig, TrainTurns
from megatron_rl.data.chat_content import chat_arguments, content_parts, image_folder, json_value, texts_of
from megatron_rl.data.images import ImageRef, ImageSource
from megatron_rl.data.prompts import (
    RowContent,
    check_images,
    encode_response,
    expand_images,
    first_and_last,
    read_content,
    rows_of_each,
    text_field,
    tokenize,
)
from megatron_rl.data.row_files import Row, describe, is_missing, lookup, read_rows
from megatron_rl.data.tokenizer import Message, Tokenizer
from megatron_rl.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_response": "tool"}
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields that chat templates read the thoughts of a turn from."""
_CHANGED = (
    "conversations in which the chat template changes earlier turns: each became several sequences, so that every trained "
    "turn has the context that it is generated from"
)
_NO_THOUGHTS = "trained turns whose thoughts the chat template leaves out: the model learns to answer without them"
_OTHER_START = "trained turns that do not start as the template prompts for them, as an opened thought does: see data.chat_template_kwargs"
_MERGED = "trained turns whose first token also has the end of the prompt: the model never generates this token"
_NO_END = "trained turns that the chat template does not close with a special token: the model does not learn to stop"


@dataclass(frozen=True)
class ConversationRow:
    content: RowContent
    """The messages, images and template arguments of the row."""
    trained: tuple[int, ...]
    """Indices of the messages that are trained, ascending."""


@dataclass(frozen=True, eq=False)
class TrainingSequence:
    token_ids: Sequence[int]
    mask: np.ndarray
    """[n] bool, True on the tokens that are trained."""
    images: tuple[ImageRef, ...] = ()


def read_conversation(row: Row, place: str, data: DataConfig, turns: TrainTurns) -> ConversationRow:
    """The checked conversation of data.messages_field. Raises DataError with source, field and message."""
    where = f"{place}: field {data.messages_field!r}"
    given = json_value(row, data.messages_field, where)
    if not isinstance(given, list) or not given:
        raise DataError(f"{where}: expected a list of messages, got {describe(given)}")
    folder = image_folder(place, data)
    parsed = [_message(one, f"{where}: message {number}", folder, data) for number, one in enumerate(given, 1)]
    messages = [message for message, _ in parsed]
    if data.system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": data.system_prompt}, *messages]
    weights = [message.pop("weight", 1) if message["role"] == "assistant" else 0 for message in messages]
    trained = [index for index, weight in enumerate(weights) if weight]
    if not trained:
        raise DataError(f"{where}: expected a turn of the assistant to train, got none (weight 0 masks a turn); remove the row")
    content = RowContent(
        id=place,
        prompt=messages,
        answer="",
        type="",
        fields={},
        place=place,
        images=tuple(image for _, images in parsed for image in images),
        chat_arguments=chat_arguments(row, place, data, chat=True),
    )
    return ConversationRow(content, tuple(trained if turns is TrainTurns.all else trained[-1:]))


def encode_conversation(conversation: ConversationRow, tokenizer: Tokenizer, notes: Counter[str]) -> list[TrainingSequence]:
    """One sequence, or several if the template changes earlier turns; ``notes`` counts what a user should know.

    Raises DataError for messages that the template rejects or whose trained content it leaves out.
    """
    content, messages = conversation.content, conversation.content.prompt
    assert not isinstance(messages, str)
    render = partial(tokenizer.render_chat, arguments=content.chat_arguments)
    turn = len(messages) - 1
    try:
        whole = render(messages)
        groups: list[tuple[str, list[tuple[int, int]]]] = [(whole, [])]
        """Texts with the (start, end) of the turns that are trained in them."""
        for turn in reversed(conversation.trained):
            own = whole if turn == len(messages) - 1 else render(messages[: turn + 1])
            own, start = _with_start(own, messages[:turn], render, tokenizer, notes)
            _check_shown(messages[turn], own[start:], notes)
            notes[_NO_END] += not own.rstrip().endswith(tokenizer.special_texts)
            ends = ((spans, _end(text, own, start, tokenizer)) for text, spans in groups)
            found = next(((spans, end) for spans, end in ends if end is not None), None)
            if found is None:
                groups.append((own, [(start, len(own))]))
            else:
                found[0].append((start, found[1]))
        used = [(text, spans) for text, spans in groups if spans]
        notes[_CHANGED] += len(used) > 1
        return [_encode(text, spans, content, tokenizer, notes) for text, spans in used]
    except DataError as error:
        raise DataError(f"{content.place}: message {turn + 1} of the conversation: {error}") from error


def _with_start(
    own: str, earlier: Sequence[Message], render: Callable[..., str], tokenizer: Tokenizer, notes: Counter[str]
) -> tuple[str, int]:
    """The text that ends with the turn after the messages ``earlier``, and the turn's start in it; ``own``: the template's."""
    context, before = render(earlier, generate=True), render(earlier)
    if own.startswith(context):
        return own, len(context)
    shared = _end(own, before, 0, tokenizer)
    if shared is None:
        # The turn changes the text before it (Hermes closes a last result of a tool otherwise). It trains in the context that it is
        # generated from, and begins where the prompt for it ends in a text with another answer.
        prompt = context.removeprefix(before) if context.startswith(before) else ""
        other = render([*earlier, {"role": "assistant", "content": "-"}])
        start = own.rfind(prompt, 0, _num_shared(own, other)) + len(prompt)
        if prompt and start >= len(prompt):
            return context + own[start:], len(context)
        raise DataError(
            f"the chat template of {tokenizer.path} changes the messages before this turn when the turn is added, so the turn's text "
            "cannot be found; mask the turn with weight 0, or use another template"
        )
    notes[_OTHER_START] += 1
    end = _num_shared(own, context)
    # Not in the middle of a word that the prompt and the turn happen to start with.
    marks = [(own.rfind(mark, shared, end), len(mark)) for mark in (*tokenizer.special_texts, "\n")]
    return own, max((place + length for place, length in marks if place >= 0), default=shared)


def _num_shared(one: str, other: str) -> int:
    """Number of characters that both texts start with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _end(text: str, own: str, start: int, tokenizer: Tokenizer) -> int | None:
    """End in ``text`` of the turn of ``own``, which starts at ``start``; None if ``text`` does not start with it.

    A template may close the last turn of a text once more, as Phi-3's with the end-of-text token: ``text`` may lack this.
    """
    end = len(own)
    while not text.startswith(own[:end]):
        closed = own[start:end].rstrip()
        mark = next((mark for mark in tokenizer.special_texts if closed.endswith(mark)), "")
        end = start + len(closed) - len(mark)
        if not mark or not own[start:end].rstrip().endswith(tokenizer.special_texts):
            return None
    return end


def _check_shown(message: Message, text: str, notes: Counter[str]) -> None:
    """Raise DataError unless ``text`` has the answer and the tool calls of ``message``; count missing thoughts."""
    *thoughts, answer = re.split(r"</?think>", texts_of(message["content"]))
    thoughts += [message[name] for name in _THOUGHTS if isinstance(message.get(name), str)]
    needed = [answer, *(call["function"]["name"] for call in message.get("tool_calls", ()))]
    missing = [part for part in needed if part.strip() not in text]
    if missing:
        raise DataError(
            f"the chat template leaves out {describe(missing[0])} of a turn that is trained; mask the turn with weight 0, or use a "
            "template that shows it"
        )
    notes[_NO_THOUGHTS] += any(part.strip() not in text for part in thoughts)


def _encode(
    text: str, spans: Sequence[tuple[int, int]], content: RowContent, tokenizer: Tokenizer, notes: Counter[str]
) -> TrainingSequence:
    token_ids, starts, ends = tokenizer.encode_with_offsets(text)
    mask = np.zeros(len(token_ids), np.bool_)
    for start, end in spans:
        mask |= (ends > start) & (starts < end)
        notes[_MERGED] += bool(((starts < start) & (ends > start)).any())
    unknown = tokenizer.unknown_text(text, token_ids)
    if unknown:
        raise DataError(f"the tokenizer does not know {unknown!r}; clean the data or use another tokenizer")
    vision = tokenizer.vision
    if vision is None:
        return TrainingSequence(token_ids, mask)
    ids = np.asarray(token_ids)
    if np.isin(ids[mask], list(vision.banned_token_ids)).any():
        raise DataError("a response cannot contain image or video tokens; remove their text")
    # A text that ends early has the first images of the row.
    is_image = ids == vision.image_token_id
    refs, expanded = expand_images(replace(content, images=content.images[: int(is_image.sum())]), token_ids, tokenizer)
    repeats = np.ones(len(ids), np.int64)
    repeats[is_image] = [vision.num_tokens(ref) for ref in refs]
    return TrainingSequence(expanded, mask.repeat(repeats), refs)


def _message(given: Any, where: str, folder: Path, data: DataConfig) -> tuple[Message, list[ImageSource]]:
    """(message as chat templates read it, images of its content)."""
    if not isinstance(given, Mapping):
        raise DataError(f"{where}: expected an object with role and content, got {describe(given)}")
    message = _from_sharegpt(given, where) if "from" in given and "role" not in given else dict(given)
    role, content = message.get("role"), message.get("content", "")
    if role not in ROLES:
        raise DataError(f"{where}: role: expected one of {', '.join(ROLES)}, got {describe(role)}")
    if message.get("weight", 1) not in (0, 1):
        raise DataError(f"{where}: weight: expected 0 (masked) or 1 (trained), got {describe(message['weight'])}")
    images: list[ImageSource] = []
    if isinstance(content, list):
        content, images = content_parts(content, where, folder, data)
        # Templates of text models print a list as it is.
        content = content if images else texts_of(content)
    if images and role == "assistant":
        raise DataError(f"{where}: a turn of the assistant cannot have images; remove them")
    if message.get("tool_calls"):
        calls = message["tool_calls"]
        message["tool_calls"] = [_tool_call(call, where) for call in (calls if isinstance(calls, list) else [calls])]
    needs_text = role != "tool" and not message.get("tool_calls")
    if not isinstance(content, (str, list)) or (needs_text and not str(content).strip()):
        raise DataError(f"{where}: content: expected non-empty text, got {describe(content)}")
    return message | {"content": content}, images


def _from_sharegpt(given: Mapping[str, Any], where: str) -> Message:
    rest = {key: value for key, value in given.items() if key not in ("from", "value")}
    role, value = given["from"], given.get("value", "")
    if role != "function_call":
        return {**rest, "role": _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role, "content": value}
    calls = _parse_json(value, f"{where}: value of a function_call")
    return {**rest, "role": "assistant", "content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """A call with its arguments as an object; OpenAI writes them as JSON text, which templates would quote once more."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise DataError(f"{where}: tool_calls: expected a function with name and arguments, got {describe(call)}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parse_json(arguments, f"{where}: tool_calls: arguments of {name}")
    if not isinstance(arguments, Mapping):
        raise DataError(f"{where}: tool_calls: arguments of {name}: expected an object, got {describe(arguments)}")
    kept = {"id": call["id"]} if "id" in call else {}
    return {**kept, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def _parse_json(text: Any, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{where}: expected JSON, got {describe(text)} ({error})") from error


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
