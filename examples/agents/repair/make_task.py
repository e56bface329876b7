"""Write the repair task: repositories with a failing check, transcripts for the warm start, and an untrained model.

A repository has two files with two functions each, one of which has a wrong constant. A transcript that repairs it::

    user "fix left top"       run()            -> "left red(2)=5 not 9"
                              read(left)       -> "1 red=x+3 / 2 blue=x+1"
                              edit(left, 1, "red=x+7")  -> "ok"
                              run()            -> "pass"
                              "done"

Most transcripts do something else (``SHARES``). Repositories of eval never occur in training.

    python examples/agents/repair/make_task.py --output outputs/agents/repair/task
"""

import argparse
import json
import random
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
from characters import write_rows
from repository import CHECK, Repository, values
from tiny_model import END, SPECIAL_TOKENS, model_config, write_json, write_tokenizer

NAMES = ("red", "blue", "green", "gray", "pink", "gold", "teal", "lime")
FILES = ("left", "right", "top", "base")
SHARES = {"repair": 0.36, "give_up": 0.14, "constant": 0.22, "edit_check": 0.14, "careless": 0.14}
"""Kinds of transcripts. constant: writes the expected number, which passes the visible check alone. edit_check: makes the check
expect what the program gives. careless: edits without having run the check."""
EVAL_SHARE = 10
"""One in so many repositories is for eval."""
MAX_TOKENS = 512
CALL = ('<tool_call>\n{"name": "', '", "arguments": {"file": "', '", "line": ', ', "text": "', '"}}\n</tool_call>')
NO_ARGUMENTS = '", "arguments": {}}\n</tool_call>'
ROLES = ("<|user|>", "<|assistant|>", "<|tool|>")
WORDS = ("fix", "done", "not", "pass", "ok", "error", "no", "file", "line", "read", "edit", "run", CHECK, "x")
TEMPLATE = """\
{%- for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<eos>
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
"""A message is a token for its role, its content and the end token; tool calls are those of Qwen2.5."""

Row = dict[str, Any]


class Task:
    """A broken repository, the name that fails, and the repaired files."""

    def __init__(self, generator: random.Random) -> None:
        names, files = generator.sample(NAMES, 4), generator.sample(FILES, 2)
        place, right = generator.randrange(4), generator.randrange(10)
        sums = []
        for i in range(4):
            other = generator.choice(names[:i]) if i and i != place and generator.random() < 0.25 else "x"
            sums.append(f"{other}+{right if i == place else generator.randrange(10)}")
        wrong = generator.choice([digit for digit in range(10) if digit != right])
        x = generator.randrange(10 - right)
        self.name, self.file, self.line, self.x, self.y = names[place], files[place // 2], 1 + place % 2, x, x + right
        lines = [f"{name}={one}" for name, one in zip(names, sums, strict=True)]
        self.repaired = {files[0]: lines[:2], files[1]: lines[2:], CHECK: [f"{self.name}({x})={self.y}"]}
        self.right = lines[place]
        lines[place] = f"{self.name}=x+{wrong}"
        self.files = {files[0]: lines[:2], files[1]: lines[2:], CHECK: self.repaired[CHECK]}
        self.got = x + wrong
        self.prompt = f"fix {files[0]} {files[1]}"


def transcript(task: Task, kind: str, generator: random.Random) -> list[Row]:
    """Messages of one kind (``SHARES``); the tools answer as they do for an agent."""
    repository, messages = Repository(task.files), [{"role": "user", "content": task.prompt}]

    def call(tool: str, **arguments: Any) -> None:
        said = {"name": tool, "arguments": arguments}
        number = f"call{len(messages)}"
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"id": number, "type": "function", "function": said}]})
        messages.append({"role": "tool", "tool_call_id": number, "content": repository.call(tool, json.dumps(arguments))})

    if kind == "careless":
        file, line = next(iter(task.files)), generator.randrange(2)
        call("read", file=file)
        call("edit", file=file, line=line + 1, text=f"{task.files[file][line].partition('=')[0]}=x+{generator.randrange(10)}")
    else:
        call("run")
    if kind == "edit_check":
        call("edit", file=CHECK, line=1, text=f"{task.name}({task.x})={task.got}")
        call("run")
    elif kind != "careless":
        call("read", file=task.file)
    if kind in ("repair", "constant"):
        call("edit", file=task.file, line=task.line, text=task.right if kind == "repair" else f"{task.name}={task.y}")
        call("run")
    return [*messages, {"role": "assistant", "content": "done"}]


def rows(name: str, count: int, seed: int) -> Iterator[Row]:
    """The rows of file ``name``: train, sft or eval."""
    generator = random.Random(f"{seed} {name}")
    while count:
        task = Task(generator)
        files = json.dumps(task.files)
        if (zlib.crc32(files.encode()) % EVAL_SHARE == 0) != (name == "eval"):
            continue
        count -= 1
        if name == "sft":
            kind = generator.choices(list(SHARES), list(SHARES.values()))[0]
            yield {"id": f"sft-{count}", "files": files, "messages": transcript(task, kind, generator)}
        else:
            yield {"id": f"{name}-{count}", "prompt": task.prompt, "answer": json.dumps(values(task.repaired)), "files": files}


def write_model_folder(folder: Path) -> None:
    """An untrained model; a token is a word, a character, or the text between two arguments of a tool call."""
    pieces = (*CALL, NO_ARGUMENTS)
    characters = sorted({*"0123456789+=()x \n", *"".join(pieces)})
    vocabulary = list(dict.fromkeys((*SPECIAL_TOKENS, *ROLES, *pieces, *NAMES, *FILES, *WORDS, *characters)))
    pattern = "|".join(map(_escaped, (*ROLES, END, *pieces))) + r"|[a-z]+|[\s\S]"
    size = -(-len(vocabulary) // 8) * 8
    write_json(folder / "config.json", model_config(size, max_tokens=MAX_TOKENS))
    special: Mapping[str, Any] = {"special_tokens": [*SPECIAL_TOKENS, *ROLES], "additional_special_tokens": list(ROLES)}
    write_tokenizer(folder, vocabulary, pattern, max_tokens=MAX_TOKENS, chat_template=TEMPLATE, **special)


def _escaped(text: str) -> str:
    return "".join(character if character.isalnum() else f"\\x{ord(character):02x}" for character in text)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder that receives the task")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-train", type=int, default=8000)
    parser.add_argument("--num-sft", type=int, default=40000)
    parser.add_argument("--num-held-out", type=int, default=200)
    options = parser.parse_args(arguments)
    for name, count in (("train", options.num_train), ("sft", options.num_sft), ("eval", options.num_held_out)):
        write_rows(options.output / f"{name}.jsonl", rows(name, count, options.seed))
    write_model_folder(options.output / "model")
    print(f"make_task: the repair task lies in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
