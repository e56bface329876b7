"""``megatron-rl doctor --template MODEL``: what a model's chat template does to conversations with tools and thoughts.

The template renders small conversations, once whole and once as the agents' endpoint continues them. A warning says what other
programs lose with this template, or what a recipe must set; a failure says that each turn would be a row of its own.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_rl.agents.chat import BadRequest, ChatRequest, Protocol
from megatron_rl.agents.chat_template import ChatTemplate, Sampled
from megatron_rl.data.tokenizer import Message, Tokenizer
from megatron_rl.desk.doctor.machine_checks import FAIL, OK, SKIPPED, WARN, CheckResult, show
from megatron_rl.errors import UserError

_SYSTEM: Message = {"role": "system", "content": "Be brief."}
_USER: Message = {"role": "user", "content": "Which files are there?"}
_NEXT: Message = {"role": "user", "content": "And now?"}
_TEXT, _THOUGHT = "Here is the answer.", "Let me think about it."
_PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
_TOOL = {"type": "function", "function": {"name": "list_files", "description": "Lists files.", "parameters": _PARAMETERS}}


def print_template(folder: Path) -> int:
    """Print each finding. Returns the exit status: 1 if a check fails. Raises UserError for a folder without a chat template."""
    tokenizer = Tokenizer(folder)
    if tokenizer.template_text == "None":
        raise UserError(f"doctor --template: {folder} has no chat template; give the folder of a chat model")
    console, failed = Console(highlight=False), 0
    for line in template_lines(tokenizer):
        show(line, console)
        failed += line.state == FAIL
    return 1 if failed else 0


def template_lines(tokenizer: Tokenizer) -> Iterator[CheckResult]:
    """All findings in order."""
    template = ChatTemplate(tokenizer)
    yield _roles_line(template)
    yield _tools_line(template)
    for name, answer, after in _answers():
        yield _tail_line(template, name, answer, after)
    yield _beside_line(template)
    yield _thoughts_line(template)
    yield _again_line(template)
    yield _stop_line(template)
    yield _injection_line(template)


def _answers() -> list[tuple[str, Message, list[Message]]]:
    one, two = _called(1), _called(2)
    return [
        ("after a text", {"role": "assistant", "content": _TEXT}, [_NEXT]),
        ("after a call", one, _results(1)),
        ("after two calls", two, _results(2)),
        ("after thoughts", {"role": "assistant", "content": _TEXT, "reasoning_content": _THOUGHT}, [_NEXT]),
    ]


def _called(number: int, **fields: Any) -> Message:
    function = {"name": "list_files", "arguments": {"path": "src"}}
    calls = [{"id": f"call0000{i}", "type": "function", "function": function} for i in range(number)]
    return {"role": "assistant", "content": "", "tool_calls": calls, **fields}


def _results(number: int) -> list[Message]:
    return [{"role": "tool", "tool_call_id": f"call0000{i}", "name": "list_files", "content": "a.py b.py"} for i in range(number)]


def _request(*messages: Message) -> ChatRequest:
    return ChatRequest(Protocol.CHAT, messages, tools=(_TOOL,))


def _text(template: ChatTemplate, *messages: Message) -> str:
    """The request as the template writes it. Raises BadRequest if it refuses."""
    return template.tokenizer.raw_text(template.prompt_ids(_request(*messages)))


def _roles_line(template: ChatTemplate) -> CheckResult:
    name, remedy = "system message", "programs that send one get an error 400: leave it out there"
    try:
        found = _SYSTEM["content"] in _text(template, _SYSTEM, _USER)
    except BadRequest as error:
        return CheckResult(name, WARN, str(error), remedy)
    return CheckResult(name, OK, "shown") if found else CheckResult(name, WARN, "not shown", "put instructions into the user's message")


def _tools_line(template: ChatTemplate) -> CheckResult:
    if "list_files" in _text(template, _USER):
        return CheckResult("tools", OK, "shown")
    return CheckResult("tools", WARN, "not shown: the model does not learn about them", "describe the tools in the system message")


def _tail_line(template: ChatTemplate, name: str, answer: Message, after: list[Message]) -> CheckResult:
    """Can a row go on after such an answer?"""
    try:
        tail = template.tail_ids(_request(_USER, answer, *after), 1, Sampled(answer, (-1,), stopped=False))
    except BadRequest as error:
        return CheckResult(name, WARN, str(error), "a program that sends this history gets an error 400")
    if tail is None:
        return CheckResult(name, FAIL, "not shown in the history: the next request is a new row", "use a template that shows it")
    if all(message["content"] in template.tokenizer.raw_text(tail) for message in after):
        return CheckResult(name, OK, "the row goes on")
    return CheckResult(name, FAIL, "the template does not show what follows", "use a template that shows it")


def _beside_line(template: ChatTemplate) -> CheckResult:
    name = "text beside a call"
    try:
        found = _TEXT in _text(template, _USER, _called(1, content=_TEXT), *_results(1))
    except BadRequest as error:
        return CheckResult(name, SKIPPED, str(error))
    return CheckResult(name, OK, "shown") if found else CheckResult(name, WARN, "dropped when a history is rendered; rows here keep it")


def _thoughts_line(template: ChatTemplate) -> CheckResult:
    """Histories in which an answer's thoughts are shown."""
    places = {"in a tool cycle": _results(1), "after a new user message": [*_results(1), {"role": "assistant", "content": _TEXT}, _NEXT]}
    shown = {}
    for where, after in places.items():
        try:
            shown[where] = bool(template.shown_thoughts(_request(_USER, _called(1, reasoning_content=_THOUGHT), *after), {1}))
        except BadRequest as error:
            return CheckResult("thoughts", SKIPPED, str(error))
    if not any(shown.values()):
        return CheckResult("thoughts", WARN, "never shown; rows here keep them", "thoughts: template makes a new row after each thought")
    text = ", ".join(f"{'kept' if kept else 'dropped'} {where}" for where, kept in shown.items())
    if all(shown.values()):
        return CheckResult("thoughts", OK, text)
    return CheckResult("thoughts", WARN, text, "thoughts: keep leaves them in the row; thoughts: template makes a new row where they go")


def _again_line(template: ChatTemplate) -> CheckResult:
    """Programs that render histories themselves: does a history begin with the text that was answered before?"""
    broken = []
    for name, answer, after in _answers():
        try:
            prompt = _text(template, _USER)
            alone = template.tokenizer.render_chat([_USER, answer], [_TOOL], generate=False)
            whole = _text(template, _USER, answer, *after)
        except UserError:
            continue
        if not alone.startswith(prompt) or not whole.startswith(alone.rstrip()):
            broken.append(name)
    if not broken:
        return CheckResult("rendered again", OK, "a history begins with the text that was answered before")
    return CheckResult("rendered again", WARN, f"another text {', '.join(broken)}; rows here are never rendered again")


def _stop_line(template: ChatTemplate) -> CheckResult:
    """Do the stop tokens of a run end a turn where the template ends it?"""
    tokenizer, name = template.tokenizer, "stop token"
    ends = {}
    for _, answer, after in _answers()[:2]:
        try:
            if (id := template.stop_id(_request(_USER, answer, *after), 1, answer)) is not None:
                ends[id] = tokenizer.raw_text([id])
        except BadRequest:
            continue
    missing = sorted(ends.keys() - {tokenizer.eos_id})
    if not ends:
        return CheckResult(name, WARN, "the template ends an answer with no control token", "set rollout.stop_token_ids")
    if missing:
        found = f"answers end with {' or '.join(ends.values())}; the tokenizer's end of text is {tokenizer.raw_text([tokenizer.eos_id])}"
        return CheckResult(name, WARN, found, f"set rollout.stop_token_ids={missing}")
    return CheckResult(name, OK, ends[tokenizer.eos_id])


def _injection_line(template: ChatTemplate) -> CheckResult:
    tokenizer, name = template.tokenizer, "control tokens"
    mark = next((text for text in tokenizer.special_texts if text in tokenizer.template_text), "")
    if not mark:
        return CheckResult(name, SKIPPED, "the template writes none")
    hostile, number = {"role": "user", "content": f"a{mark}b"}, tokenizer.encode(mark)[0]
    plain = template.prompt_ids(_request({"role": "user", "content": "ab"})).count(number)
    if template.prompt_ids(_request(hostile)).count(number) != plain:
        return CheckResult(name, FAIL, f"{mark} in a message becomes a control token", "report it with this model's name")
    return CheckResult(name, OK, f"{mark} in a message stays letters, unlike where the rendered text is encoded")
