"""Convert files of public data sets to this project's rows: {id, prompt, answer, type, ...}.

    python tools/prepare_data.py gsm8k --input train.jsonl --output data/gsm8k.jsonl

| format      | reads (JSONL, JSON array, Parquet, dataset folder)             | writes besides id, prompt, type        |
|-------------|----------------------------------------------------------------|----------------------------------------|
| gsm8k       | question, answer ending in "#### number"                       | answer, response                       |
| dapo_math   | prompt (messages or text), reward_model.ground_truth           | answer, source                         |
| humaneval   | task_id, prompt, canonical_solution, test, entry_point         | answer, response, prompt_code, tests, entry_point |
| mbpp        | task_id, text or prompt, code, test_list, test_setup_code      | answer, response, tests, entry_point   |
| preferences | chosen, rejected as texts, dialogues or messages; prompt       | chosen, rejected                       |
| conversations | the same as messages, with tools                             | messages in OpenAI's form, tools; answer, if given |
| messages    | messages (role, content) or conversations (from, value)        | response, if an answer ends them; answer, if given |
| multimodal  | image(s), question or problem, answer or solution, or bbox     | answer, images (paths from the output's folder) |

A bad row is written with source and reason to ``<output>.bad.jsonl`` and counted; duplicate rows are counted and
skipped. Exit status: 0 done; 2 if any row is bad (unless --skip-bad-rows) or none is good;
in that case nothing is written.
"""

import argparse
import ast
import hashlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_rl.config.schema import DataConfig, TrainTurns
from megatron_rl.data.conversation_rows import read_conversation
from megatron_rl.data.row_files import Row, describe, is_missing, lookup, read_rows
from megatron_rl.errors import DataError, UserError
from megatron_rl.rewards.rules.grounding import read_box
from megatron_rl.system.files.atomic_files import atomic_text_file

MAX_SHOWN = 5
"""Bad rows that the terminal shows; the file has all."""


class BadRow(Exception):
    """Error with the reason why a row cannot be used."""


@dataclass(frozen=True)
class Context:
    """Options of a converter."""

    file: Path
    """The file or folder that the row comes from."""
    label: str
    """Short name of ``file``, of no other input."""
    number: str
    """Line or row number in ``file``."""
    output: Path
    image_root: Path | None = None
    bbox_format: str = "xyxy"

    def numbered_id(self, name: str) -> str:
        """Id of a row in a set without ids."""
        return f"{name}-{self.label}-{self.number}"


Converter = Callable[[Row, Context], dict[str, Any]]


# ------------------------------------------------------------------------------------------------------------ the sets

_CALCULATOR = re.compile(r"<<[^<>]*>>")
_FINAL_ANSWER = re.compile(r"####\s*(\S.*?)\s*$")
_NUMBER = re.compile(r"-?(\d+(\.\d+)?|\.\d+)")


def gsm8k(row: Row, context: Context) -> dict[str, Any]:
    """The reference solution keeps its words and its last line; the calculator's marks go."""
    solution = text_of(row, "answer")
    final = _FINAL_ANSWER.search(solution)
    if final is None:
        raise BadRow(f"answer: expected a last line '#### number', got the end {solution[-40:]!r}")
    number = final.group(1).replace(",", "").removeprefix("$")
    if not _NUMBER.fullmatch(number):
        raise BadRow(f"answer: expected a number after ####, got {final.group(1)!r}")
    return {
        "id": given_id(row, "id") or context.numbered_id("gsm8k"),
        "prompt": text_of(row, "question"),
        "answer": number,
        "response": _CALCULATOR.sub("", solution),
        "type": "math",
    }


def dapo_math(row: Row, context: Context) -> dict[str, Any]:
    """The prompt stays as it is: its words say in which form the answer is expected."""
    answer = lookup(row, "reward_model.ground_truth")
    if is_missing(answer) or isinstance(answer, (dict, list, bool)) or not str(answer).strip():
        raise BadRow(f"reward_model.ground_truth: expected the answer, got {describe(answer)}")
    prompt = lookup(row, "prompt")
    converted = {
        "id": given_id(row, "extra_info.index", "id") or context.numbered_id("dapo"),
        "prompt": messages_of(prompt, "prompt") if isinstance(prompt, list) else text_of(row, "prompt"),
        "answer": str(answer).strip(),
        "type": "math",
    }
    source = lookup(row, "data_source")
    return {**converted, "source": source} if isinstance(source, str) else converted


def humaneval(row: Row, context: Context) -> dict[str, Any]:
    """The canonical solution goes on where the prompt ends; ``tests`` calls the check that the set only defines."""
    prompt, solution = text_of(row, "prompt"), text_of(row, "canonical_solution")
    entry_point = text_of(row, "entry_point")
    program = parsed(prompt + solution, "prompt + canonical_solution")
    if entry_point not in functions_of(program):
        raise BadRow(f"entry_point: {entry_point!r} is not a function of prompt + canonical_solution")
    tests = f"{text_of(row, 'test').rstrip()}\n\ncheck({entry_point})\n"
    if "check" not in functions_of(parsed(tests, "test")):
        raise BadRow("test: expected a function check(candidate)")
    return {
        "id": given_id(row, "task_id") or context.numbered_id("humaneval"),
        "prompt": prompt,
        "answer": solution,
        "response": solution,
        "type": "code",
        "prompt_code": prompt,
        "tests": tests,
        "entry_point": entry_point,
    }


def mbpp(row: Row, context: Context) -> dict[str, Any]:
    """A row of either edition: full (text, test_setup_code) or sanitized (prompt, test_imports)."""
    question, code = text_of(row, "text", "prompt"), text_of(row, "code").replace("\r\n", "\n")
    asserts = lookup(row, "test_list")
    if not isinstance(asserts, list) or not asserts or not all(isinstance(a, str) and a.strip() for a in asserts):
        raise BadRow(f"test_list: expected a list of assert statements, got {describe(asserts)}")
    imports = lookup(row, "test_imports") or []
    setup = [lookup(row, "test_setup_code") or "", *(imports if isinstance(imports, list) else [imports])]
    if not all(isinstance(part, str) for part in setup):
        raise BadRow(f"test_setup_code, test_imports: expected text, got {describe(setup)}")
    tests = "\n".join([*(part for part in setup if part.strip()), *asserts]) + "\n"
    called = [node.func.id for node in ast.walk(parsed(tests, "test_list")) if _calls_a_name(node)]
    defined = functions_of(parsed(code, "code"))
    tested = [name for name in called if name in defined]
    if not tested:
        raise BadRow(f"test_list: no test calls a function of code, which has {', '.join(defined) or 'none'}")
    return {
        "id": f"mbpp/{given_id(row, 'task_id') or context.number}",
        "prompt": f"{question.strip()}\nYour code should pass these tests:\n\n" + "\n".join(asserts) + "\n",
        "answer": code,
        "response": code,
        "type": "code",
        "tests": tests,
        "entry_point": tested[0],
    }


def _calls_a_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def preferences(row: Row, context: Context) -> dict[str, Any]:
    """Two answers to the same prompt; the prompt of dialogues and messages is what both share."""
    chosen, rejected = lookup(row, "chosen"), lookup(row, "rejected")
    if isinstance(chosen, str) and isinstance(rejected, str) and _is_dialogue(chosen) and _is_dialogue(rejected):
        chosen, rejected = _turns(chosen), _turns(rejected)
    if isinstance(chosen, list) and isinstance(rejected, list):
        prompt, chosen_text, rejected_text = _split_messages(row, chosen, rejected)
    else:
        chosen_text, rejected_text = text_of(row, "chosen"), text_of(row, "rejected")
        prompt = _plain_prompt(row)
    if chosen_text.strip() == rejected_text.strip():
        raise BadRow("chosen and rejected are the same")
    return {
        "id": given_id(row, "id", "prompt_id") or context.numbered_id("preference"),
        "prompt": prompt,
        "chosen": chosen_text,
        "rejected": rejected_text,
        "type": "preference",
    }


_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")
_ROLES = {"Human": "user", "Assistant": "assistant"}
_PROMPT_NAMES = ("prompt", "question", "instruction", "input")


def _is_dialogue(text: str) -> bool:
    """Anthropic's form: turns that begin with Human: and Assistant: after an empty line."""
    return text.lstrip().startswith("Human:") and "\n\nAssistant:" in text


def _turns(dialogue: str) -> list[dict[str, str]]:
    _, *parts = _TURN.split("\n\n" + dialogue.strip())
    return [{"role": _ROLES[who], "content": said.strip()} for who, said in zip(parts[::2], parts[1::2], strict=True)]


def _split_messages(row: Row, chosen: list[Any], rejected: list[Any]) -> tuple[list[dict[str, str]], str, str]:
    first = messages_of(chosen, "chosen", last="assistant")
    second = messages_of(rejected, "rejected", last="assistant")
    prompt = first[:-1]
    if prompt != second[:-1]:
        raise BadRow("chosen and rejected differ before their last message; expected one prompt for both")
    if not prompt:
        given = lookup(row, "prompt")
        prompt = messages_of(given, "prompt") if isinstance(given, list) else _user(_prompt_text(row))
    return prompt, first[-1]["content"], second[-1]["content"]


def _plain_prompt(row: Row) -> str | list[dict[str, str]]:
    prompt = lookup(row, "prompt")
    if isinstance(prompt, list):
        return messages_of(prompt, "prompt")
    text, system = _prompt_text(row), lookup(row, "system")
    if text.lstrip().startswith("Human:"):
        return messages_of(_turns(text.strip().removesuffix("Assistant:")), "prompt")
    return [{"role": "system", "content": system}, *_user(text)] if isinstance(system, str) and system else text


def _prompt_text(row: Row) -> str:
    return text_of(row, *_PROMPT_NAMES)


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


_SPEAKERS = {"human": "user", "gpt": "assistant"}


def messages(row: Row, context: Context) -> dict[str, Any]:
    """An answer that ends a conversation is the response; all before it is the prompt."""
    name = next((name for name in ("messages", "conversations") if not is_missing(lookup(row, name))), "messages")
    given = lookup(row, name)
    if isinstance(given, list) and all(isinstance(message, Mapping) and "from" in message for message in given):
        given = [{"role": _SPEAKERS.get(m["from"], m["from"]), "content": m.get("value")} for m in given]
    answered = isinstance(given, list) and bool(given) and isinstance(given[-1], Mapping) and given[-1].get("role") == "assistant"
    response = messages_of(given, name, last="assistant")[-1]["content"] if answered else None
    answer = lookup(row, "answer")
    converted = {
        "id": given_id(row, "id", "prompt_id") or context.numbered_id("messages"),
        "prompt": messages_of(given[:-1] if answered else given, name),
        "type": "chat",
    }
    return converted | ({"response": response} if answered else {}) | ({} if is_missing(answer) else {"answer": str(answer)})


def conversations(row: Row, context: Context) -> dict[str, Any]:
    """Whole conversations, for sft; masked turns keep their weight 0."""
    name = next((name for name in ("messages", "conversations") if not is_missing(lookup(row, name))), "messages")
    try:
        found = read_conversation(row, "", DataConfig(messages_field=name), TrainTurns.all)
    except DataError as error:
        raise BadRow(str(error).removeprefix(": ")) from error
    if found.content.images:
        raise BadRow(f"{name}: expected text, got images; sft reads such rows as they are (data.messages_field)")
    given = [
        {**message, "weight": 0} if message["role"] == "assistant" and index not in found.trained else message
        for index, message in enumerate(found.content.prompt)
    ]
    answer, tools = lookup(row, "answer"), found.content.chat_arguments.get("tools")
    converted = {"id": given_id(row, "id", "prompt_id") or context.numbered_id("conversations"), "messages": given, "type": "chat"}
    return converted | ({"tools": tools} if tools else {}) | ({} if is_missing(answer) else {"answer": str(answer)})


_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_IMAGE_MARK = "<image>"
LETTERS = "ABCDEFGHIJ"


def multimodal(row: Row, context: Context) -> dict[str, Any]:
    """Pictures as files: embedded ones are written next to the output, those given by path are checked."""
    question = text_of(row, "question", "problem", "query", "prompt")
    images = _images(row, context)
    marks = question.count(_IMAGE_MARK)
    if marks not in (0, len(images)):
        raise BadRow(f"the question has {marks} {_IMAGE_MARK} marks for {len(images)} images")
    box = lookup(row, "bbox")
    choices = lookup(row, "choices") or lookup(row, "options")
    if not is_missing(box):
        answer, prompt_type = _box(box, context.bbox_format), "grounding"
    elif choices:
        question, answer = _choice(row, question, choices)
        prompt_type = "choice"
    else:
        answer, prompt_type = _plain_answer(row), "multimodal"
    return {
        "id": given_id(row, "id", "question_id", "pid") or context.numbered_id("image"),
        "prompt": question,
        "answer": answer,
        "type": prompt_type,
        "images": images,
    }


def _plain_answer(row: Row) -> str:
    value = next((v for v in (lookup(row, "answer"), lookup(row, "solution")) if not is_missing(v)), None)
    if value is None or isinstance(value, (dict, list, bytes)):
        raise BadRow(f"answer, solution: expected text or a number, got {describe(value)}")
    tagged = _ANSWER_TAG.findall(str(value))
    answer = (tagged[-1] if tagged else str(value)).strip()
    if not answer:
        raise BadRow("answer, solution: expected text or a number, got empty text")
    return answer


def _choice(row: Row, question: str, choices: Any) -> tuple[str, str]:
    """(question with lettered options, letter of the right one)."""
    if not isinstance(choices, list) or not 2 <= len(choices) <= len(LETTERS):
        raise BadRow(f"choices: expected a list of 2 to {len(LETTERS)} options, got {describe(choices)}")
    options = [str(choice).strip() for choice in choices]
    value = next((v for v in (lookup(row, "answer"), lookup(row, "solution")) if not is_missing(v)), None)
    if isinstance(value, int) and not isinstance(value, bool) and str(value) not in options:
        letter = LETTERS[value] if 0 <= value < len(options) else ""
    else:
        answer = _plain_answer(row)
        letters = LETTERS[: len(options)]
        letter = letters[options.index(answer)] if answer in options else answer.strip("(). ").upper()
        letter = letter if len(letter) == 1 and letter in letters else ""
    if not letter:
        raise BadRow(f"answer: expected one of the {len(options)} choices, its letter or its number, got {value!r}")
    return "\n".join([question, *(f"{LETTERS[i]}. {option}" for i, option in enumerate(options))]), letter


def _box(box: Any, form: str) -> str:
    """``x1 y1 x2 y2``, as the reward ``bbox`` reads it."""
    valid = isinstance(box, list) and len(box) == 4
    if not valid or not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in box):
        raise BadRow(f"bbox: expected four numbers, got {describe(box)}")
    x, y, third, fourth = box
    corners = (x, y, third, fourth) if form == "xyxy" else (x, y, x + third, y + fourth)
    text = " ".join(f"{value:.9f}".rstrip("0").rstrip(".") for value in corners)
    if read_box(text) is None:
        raise BadRow(f"bbox: expected x1 < x2 and y1 < y2, got {box} as {form}; see --bbox-format")
    return text


def _images(row: Row, context: Context) -> list[str]:
    names = ("images", "image", "image_path", "image_paths")
    value = next((v for v in (lookup(row, name) for name in names) if not is_missing(v)), None)
    images = value if isinstance(value, list) else [value]
    if value is None or not images:
        raise BadRow(f"{', '.join(names)}: expected an image, got {describe(value)}")
    return [os.path.relpath(_image(image, context), context.output.parent.resolve()) for image in images]


def _image(image: Any, context: Context) -> Path:
    content = image.get("bytes") if isinstance(image, Mapping) else image
    if isinstance(content, bytes):
        return _write_image(content, context)
    path = image.get("path") if isinstance(image, Mapping) else image
    if not isinstance(path, str) or not path:
        raise BadRow(f"image: expected a path or the bytes of an image, got {describe(image)}")
    root = context.image_root or (context.file if context.file.is_dir() else context.file.parent)
    if not (root / path).is_file():
        raise BadRow(f"image: {root / path} does not exist; see --image-root")
    return (root / path).resolve()


_IMAGE_KINDS = {
    "png": re.compile(rb"\x89PNG"),
    "jpg": re.compile(rb"\xff\xd8\xff"),
    "gif": re.compile(rb"GIF8"),
    "bmp": re.compile(rb"BM"),
    "webp": re.compile(rb"RIFF....WEBP", re.DOTALL),
}


def _write_image(content: bytes, context: Context) -> Path:
    """Named by its content, so that one picture is one file."""
    suffix = next((kind for kind, start in _IMAGE_KINDS.items() if start.match(content)), None)
    if suffix is None:
        raise BadRow(f"image: {len(content)} bytes that begin with {content[:8]!r} are no PNG, JPEG, GIF, BMP or WebP")
    folder = context.output.parent.resolve() / f"{context.output.name.removesuffix('.jsonl')}_images"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{hashlib.sha256(content).hexdigest()[:24]}.{suffix}"
    if not path.exists():
        partial = path.with_suffix(".partial")
        partial.write_bytes(content)
        partial.replace(path)
    return path


CONVERTERS: dict[str, Converter] = {
    "gsm8k": gsm8k,
    "dapo_math": dapo_math,
    "humaneval": humaneval,
    "mbpp": mbpp,
    "preferences": preferences,
    "messages": messages,
    "conversations": conversations,
    "multimodal": multimodal,
}


# ------------------------------------------------------------------------------------------------------ parts of a row


def text_of(row: Row, *names: str) -> str:
    """The first of the fields that the row has; it must be text with something in it."""
    value = next((v for v in (lookup(row, name) for name in names) if not is_missing(v)), None)
    if not isinstance(value, str) or not value.strip():
        got = "empty text" if isinstance(value, str) else describe(value)
        raise BadRow(f"{' or '.join(names)}: expected text, got {got}; fields here are {', '.join(sorted(row))}")
    return value


def given_id(row: Row, *names: str) -> str:
    value = next((v for v in (lookup(row, name) for name in names) if not is_missing(v)), None)
    if isinstance(value, (dict, list, bool, bytes)):
        raise BadRow(f"{' or '.join(names)}: expected text or a number, got {describe(value)}")
    return "" if value is None else str(value)


def messages_of(value: Any, name: str, *, last: str = "user") -> list[dict[str, str]]:
    """Messages with role and content, of which the last has the role ``last``."""
    if not isinstance(value, list) or not value:
        raise BadRow(f"{name}: expected messages, got {describe(value)}")
    messages = []
    for number, message in enumerate(value, start=1):
        role, content = (message.get(key) if isinstance(message, Mapping) else None for key in ("role", "content"))
        if not isinstance(role, str) or not isinstance(content, str) or not content.strip():
            raise BadRow(f"{name}: message {number}: expected role and content with text, got {describe(message)}")
        messages.append({"role": role, "content": content})
    if messages[-1]["role"] != last:
        raise BadRow(f"{name}: expected a last message of {last}, got {messages[-1]['role']}")
    return messages


def parsed(code: str, name: str) -> ast.Module:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadRow(f"{name}: not a Python program: {error}") from error


def functions_of(program: ast.Module) -> list[str]:
    """Names that the program's top level defines."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node.name for node in program.body if isinstance(node, kinds)]


# ------------------------------------------------------------------------------------------------------------ the tool


@dataclass
class Outcome:
    num_by_type: Counter[str] = field(default_factory=Counter)
    """Number of rows written."""
    num_repeated: int = 0
    """Rows equal to an earlier one."""
    bad: list[dict[str, str]] = field(default_factory=list)
    """Place and reason of each bad row."""

    @property
    def num_written(self) -> int:
        return self.num_by_type.total()

    @property
    def num_read(self) -> int:
        return self.num_written + self.num_repeated + len(self.bad)

    def add_bad(self, place: str, reason: str) -> None:
        self.bad.append({"place": place, "reason": reason})

    def kinds_of_bad(self) -> Counter[str]:
        """Reasons without what differs from row to row."""
        return Counter(re.sub(r"'[^']*'|\d+", "…", re.split(r", got |; ", entry["reason"])[0]) for entry in self.bad)


def convert(arguments: argparse.Namespace, outcome: Outcome) -> Iterator[dict[str, Any]]:
    """Yield each good row once; ``outcome`` counts all rows."""
    digests: dict[str, bytes] = {}
    """Digest of each written row, by id."""
    for row, place, context in _rows(arguments, outcome):
        try:
            converted = CONVERTERS[arguments.format](row, context)
        except BadRow as error:
            outcome.add_bad(place, str(error))
            continue
        if arguments.type:
            converted["type"] = arguments.type
        digest = hashlib.blake2b(json.dumps(converted, sort_keys=True).encode(), digest_size=16).digest()
        if converted["id"] not in digests:
            digests[converted["id"]] = digest
            outcome.num_by_type[converted["type"]] += 1
            yield converted
        elif digests[converted["id"]] == digest:
            outcome.num_repeated += 1
        else:
            outcome.add_bad(place, f"id {converted['id']!r} is that of an earlier row with other content")


def _rows(arguments: argparse.Namespace, outcome: Outcome) -> Iterator[tuple[Row, str, Context]]:
    stems = [Path(name).name.split(".")[0] for name in arguments.input]
    image_root = Path(arguments.image_root) if arguments.image_root else None
    for index, (name, stem) in enumerate(zip(arguments.input, stems, strict=True), start=1):
        label = stem if stems.count(stem) == 1 else f"{stem}{index}"
        for row, place in read_rows([name], split=arguments.split, on_bad_row=outcome.add_bad):
            number = place.removeprefix(f"{name}:").removeprefix("row ")
            output = Path(arguments.output)
            yield row, place, Context(Path(name), label, number, output, image_root, arguments.bbox_format)


def prepare(arguments: argparse.Namespace) -> Outcome:
    """Write output and list of bad rows. UserError, and no output, when the rules of the command say so."""
    output = Path(arguments.output)
    bad_path = output.with_name(f"{output.name.removesuffix('.jsonl')}.bad.jsonl")
    if output.resolve() in {Path(name).resolve() for name in arguments.input}:
        raise UserError(f"--output {output} is one of the inputs; give another file")
    outcome = Outcome()
    try:
        with atomic_text_file(output) as file:
            file.writelines(json.dumps(row) + "\n" for row in convert(arguments, outcome))
            _check(outcome, arguments.skip_bad_rows, bad_path)
    finally:
        bad_path.unlink(missing_ok=True)
        if outcome.bad:
            with atomic_text_file(bad_path) as file:
                file.writelines(json.dumps(entry) + "\n" for entry in outcome.bad)
    return outcome


def _check(outcome: Outcome, skip_bad_rows: bool, bad_path: Path) -> None:
    if outcome.bad and not skip_bad_rows:
        shown = "\n".join(f"  {entry['place']}: {entry['reason']}" for entry in outcome.bad[:MAX_SHOWN])
        raise UserError(
            f"{len(outcome.bad):,} of {outcome.num_read:,} rows are bad; nothing was written. Fix them, or leave them "
            f"out with --skip-bad-rows. All are listed in {bad_path}:\n{shown}"
        )
    if not outcome.num_written:
        where = f"; {bad_path} says why" if outcome.bad else ""
        raise UserError(f"no row is left of {outcome.num_read:,}{where}; nothing was written")


def outcome_table(outcome: Outcome, output: str) -> Table:
    table = Table(title=output, title_justify="left", show_header=False)
    table.add_column(overflow="fold")
    table.add_column(justify="right")
    table.add_row("rows read", f"{outcome.num_read:,}")
    table.add_row("written", f"{outcome.num_written:,}")
    for name, number in sorted(outcome.num_by_type.items()):
        table.add_row(f"  type {name}", f"{number:,}")
    table.add_row("repeated, left out", f"{outcome.num_repeated:,}")
    table.add_row("bad, left out", f"{len(outcome.bad):,}")
    for reason, number in outcome.kinds_of_bad().most_common(MAX_SHOWN):
        table.add_row(f"  {reason}", f"{number:,}")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("format", choices=sorted(CONVERTERS))
    parser.add_argument("--input", nargs="+", required=True, help="files or dataset folders")
    parser.add_argument("--output", required=True, help="JSONL file to write")
    parser.add_argument("--skip-bad-rows", action="store_true", help="skip bad rows instead of refusing the file")
    parser.add_argument("--type", default="", help="prompt type of all rows, instead of the format's own")
    parser.add_argument("--split", default="train", help="split of a dataset folder")
    parser.add_argument("--image-root", default="", help="folder of relative image paths (default: the input's folder)")
    parser.add_argument("--bbox-format", choices=("xyxy", "xywh"), default="xyxy", help="corners, or corner and size")
    arguments = parser.parse_args(argv)
    try:
        outcome = prepare(arguments)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    Console().print(outcome_table(outcome, arguments.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
