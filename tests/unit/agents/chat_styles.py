"""Six chat-template styles, written for the tests: how each renders a conversation, how its model writes, and how that is read."""

import functools
import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.agents.turn_text import Parsers
from megatron_rl.data.tokenizer import Tokenizer

_HEAD = """{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
{% for t in tools %}{{ t | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}"""
_LAST_USER = """{%- set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
"""  # noqa: E501
_RESULTS = """{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}{{ '\n' }}<tool_response>
{{ m.content }}
</tool_response>{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% endif %}"""
_CALLS = """{% for c in m.tool_calls or [] %}{% if not loop.first or body %}{{ '\\n' }}{% endif %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
"""


def _chatml(thoughts: str, body: str) -> str:
    return (
        _HEAD + _LAST_USER
        + "{%- for m in messages %}{% set body = m.content or '' %}{% if m.role == 'user' %}<|im_start|>user\n{{ body }}<|im_end|>\n"
        + "{% elif m.role == 'assistant' %}<|im_start|>assistant\n" + thoughts + body + _CALLS
        + "{% elif m.role == 'tool' %}" + _RESULTS + "{% endif %}{% endfor %}"
        + "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )  # fmt: skip


QWEN25 = _chatml("", "{{ body }}")
QWEN3 = _chatml(
    "{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}<think>\n{{ (m.reasoning_content or '').strip('\\n') }}\n"
    "</think>\n\n{% endif %}",
    "{{ body.lstrip('\\n') }}",
)
LLAMA31 = """<|begin_of_text|>{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>
{%- elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{{ m.content | tojson }}<|eot_id|>{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}{% if loop.first and tools %} Functions: {{ tools | tojson }}{% endif %}<|eot_id|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""  # noqa: E501
R1 = """<｜begin▁of▁sentence｜>{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}<｜User｜>{{ m.content }}
{%- elif m.role == 'assistant' %}<｜Assistant｜>{{ (m.content or '').split('</think>')[-1] }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>
{%- for c in m.tool_calls %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}
```json
{{ c.function.arguments | tojson }}
```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>
{%- elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<｜tool▁outputs▁begin｜>{% endif %}<｜tool▁output▁begin｜>{{ m.content }}
{%- raw %}{% endraw %}<｜tool▁output▁end｜>{% if loop.last or loop.nextitem.role != 'tool' %}<｜tool▁outputs▁end｜>{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<｜Assistant｜><think>
{% endif %}"""  # noqa: E501
GLM = "[gMASK]<sop>{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}" + _LAST_USER + """
{%- for m in messages %}{% if m.role in ('system', 'user') %}<|{{ m.role }}|>
{{ m.content }}{% elif m.role == 'assistant' %}<|assistant|>
{% if loop.index0 > ns.last and m.reasoning_content %}<think>{{ m.reasoning_content.strip() }}</think>{% else %}<think></think>{% endif %}
{%- if (m.content or '').strip() %}{{ '\\n' + m.content.strip() }}{% endif %}{% for c in m.tool_calls or [] %}{{ '\\n' }}<tool_call>{{ c.function.name }}
{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v if v is string else v | tojson }}</arg_value>
{% endfor %}</tool_call>{% endfor %}{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|observation|>{% endif %}{{ '\n' }}<tool_response>
{{ m.content }}
</tool_response>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""  # noqa: E501
HARMONY = """<|start|>system<|message|>Reasoning: medium<|end|>{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}
{%- set ns = namespace(final=-1, name='') %}{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}{% set ns.final = loop.index0 %}
{%- endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}{% set c = m.tool_calls[0].function %}
{%- set ns.name = c.name %}{% if m.reasoning_content and loop.index0 > ns.final %}<|start|>assistant<|channel|>analysis<|message|>
{{- m.reasoning_content }}<|end|>{% endif %}<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>
{{- c.arguments | tojson }}<|call|>{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% elif m.role == 'tool' %}<|start|>functions.{{ ns.name }} to=assistant
{{- '' }}<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>{% else %}<|start|>{{ 'developer' if m.role == 'system' else m.role }}<|message|>
{{- m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""  # noqa: E501

Call = tuple[str, str]
"""Name and JSON of the arguments."""


def _tagged(thoughts: str, body: str, calls: list[Call]) -> str:
    text = body + ("\n" if body and calls else "")
    return text + "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {value}}}\n</tool_call>' for name, value in calls)


def _write_r1(thoughts: str, body: str, calls: list[Call]) -> str:
    inside = "".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{value}\n```<｜tool▁call▁end｜>" for name, value in calls
    )
    return f"{thoughts}\n</think>\n\n{body}" + (f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>" if calls else "")


def _write_glm(thoughts: str, body: str, calls: list[Call]) -> str:
    text = f"<think>{thoughts}</think>" + (f"\n{body}" if body else "")
    for name, arguments in calls:
        text += f"\n<tool_call>{name}\n"
        for key, value in json.loads(arguments).items():
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            text += f"<arg_key>{key}</arg_key>\n<arg_value>{shown}</arg_value>\n"
        text += "</tool_call>"
    return text


def _write_harmony(thoughts: str, body: str, calls: list[Call]) -> str:
    text = f"<|channel|>analysis<|message|>{thoughts}<|end|><|start|>assistant" if thoughts else ""
    if calls:
        return text + f" to=functions.{calls[0][0]}<|channel|>commentary json<|message|>{calls[0][1]}"
    return text + f"<|channel|>final<|message|>{body}"


def _read_tagged(text: str) -> tuple[str, list[Call]]:
    calls = []
    for inside in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL):
        name, _, arguments = inside.partition(', "arguments": ')
        calls.append((json.loads(name.removeprefix('{"name": ')), arguments.removesuffix("}")))
    return text.partition("<tool_call>")[0].removesuffix("\n"), calls


def _read_llama(text: str) -> tuple[str, list[Call]]:
    try:
        found = json.loads(text)
    except ValueError:
        return text, []
    return "", [(found["name"], text.partition('"parameters": ')[2].removesuffix("}"))]


def _read_r1(text: str) -> tuple[str, list[Call]]:
    calls = re.findall(r"<｜tool▁sep｜>(\w+)\n```json\n(.*?)\n```<｜tool▁call▁end｜>", text, re.DOTALL)
    return text.partition("<｜tool▁calls▁begin｜>")[0], calls


def _read_glm(text: str) -> tuple[str, list[Call]]:
    calls = []
    for name, inside in re.findall(r"<tool_call>(\w+)\n(.*?)</tool_call>", text, re.DOTALL):
        value = {}
        for key, shown in re.findall(r"<arg_key>(.*?)</arg_key>\n<arg_value>(.*?)</arg_value>", inside, re.DOTALL):
            value[key] = _value(shown)
        calls.append((name, json.dumps(value)))
    return text.partition("<tool_call>")[0].strip(), calls


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _read_harmony(text: str) -> tuple[str, list[Call]]:
    found = re.fullmatch(r" to=functions\.(\w+)<\|channel\|>commentary json<\|message\|>(.*)", text, re.DOTALL)
    return (text, []) if not found else ("", [(found[1], found[2])])


def _think_tags(text: str) -> tuple[str, str]:
    inside, found, rest = text.removeprefix("<think>").partition("</think>")
    return (inside.strip("\n"), rest.lstrip("\n")) if found or text.startswith("<think>") else ("", text)


def _think_from_the_start(text: str) -> tuple[str, str]:
    inside, _, rest = text.partition("</think>")
    return inside.strip("\n"), rest.lstrip("\n")


def _analysis(text: str) -> tuple[str, str]:
    found = re.fullmatch(r"(?:<\|channel\|>analysis<\|message\|>(.*?)(?:<\|end\|><\|start\|>assistant|$))?(.*)", text, re.DOTALL)
    assert found
    return found[1] or "", found[2].removeprefix("<|channel|>final<|message|>")


@dataclass(frozen=True)
class Style:
    name: str
    source: str
    stops: tuple[str, ...]
    """Text of the stop token after a text and after calls."""
    write: Callable[[str, str, list[Call]], str]
    read_calls: Callable[[str], tuple[str, list[Call]]]
    read_thoughts: Callable[[str], tuple[str, str]] | None = None
    max_calls: int = 2

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return make_tokenizer(self.source, self.stops[0])

    @property
    def parsers(self) -> Parsers:
        async def tools(text, tools):
            return self.read_calls(text)

        async def thoughts(text):
            return self.read_thoughts(text)

        return Parsers(tools, thoughts if self.read_thoughts else None)


def _write_qwen3(thoughts: str, body: str, calls: list[Call]) -> str:
    return f"<think>\n{thoughts}\n</think>\n\n" + _tagged("", body, calls)


def _write_llama(thoughts: str, body: str, calls: list[Call]) -> str:
    return f'{{"name": "{calls[0][0]}", "parameters": {calls[0][1]}}}' if calls else body


STYLES = {
    style.name: style
    for style in (
        Style("qwen2.5", QWEN25, ("<|im_end|>", "<|im_end|>"), _tagged, _read_tagged),
        Style("qwen3", QWEN3, ("<|im_end|>", "<|im_end|>"), _write_qwen3, _read_tagged, _think_tags),
        Style("llama3.1", LLAMA31, ("<|eot_id|>", "<|eot_id|>"), _write_llama, _read_llama, max_calls=1),
        Style("r1", R1, ("<｜end▁of▁sentence｜>",) * 2, _write_r1, _read_r1, _think_from_the_start),
        Style("glm4", GLM, ("<|user|>", "<|observation|>"), _write_glm, _read_glm, _think_tags),
        Style("harmony", HARMONY, ("<|return|>", "<|call|>"), _write_harmony, _read_harmony, _analysis, max_calls=1),
    )
}
CONTROL = """<|im_start|> <|im_end|> <|endoftext|> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>
<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜>
<｜tool▁call▁end｜>
<｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>
[gMASK] <sop> <|system|>
<|user|> <|assistant|> <|observation|> <|start|> <|end|> <|message|> <|channel|> <|return|> <|call|>""".split()
MARKS = "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <arg_key> </arg_key> <arg_value> </arg_value>".split()
"""Added tokens that are not special, as in published tokenizers."""
WORDS = "read the file run edit naïve Übung 日本 return value_x == 3.14 def foo(bar): \t x  y {z} http://a.b/c?d=1 é 🙂".split(" ")
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": {"type": "object", "properties": {}}}}
    for name in ("read_file", "run", "edit")
]


@functools.cache
def _backend():
    """A byte-level BPE tokenizer; every test that wants one shares its training."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=1200, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator([" ".join(WORDS[i % 7 :]) + json.dumps(TOOLS) for i in range(50)], trainer)
    backend.add_special_tokens(["<pad>", *CONTROL])
    backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return backend


def make_tokenizer(source: str, eos: str) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        _backend().save(str(Path(folder) / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "pad_token": "<pad>", "chat_template": source}
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings))
        return Tokenizer(folder)
