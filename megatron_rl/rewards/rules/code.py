"""Reward ``code``: unit tests run in a sandbox (docs/rewards.md).

1.0 if all tests pass, else 0.0; with ``partial_credit`` the share of asserts that hold. A program fails its tests if it
exceeds its time or memory, exits early, or returns an object where tests need a plain value. Responses are unscored if
the tests cannot run with any program, or if the sandbox does not work.
"""

import asyncio
import functools
import json
import os
import re
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from megatron_rl.data.code_lines import extract_code, fenced_blocks
from megatron_rl.data.trajectory import Score
from megatron_rl.graders.analysis.code_cases import IMPORTS, read_cases, tests_of
from megatron_rl.graders.analysis.source import InvalidTests, defined_in, infer_entry_point, names_of_tests
from megatron_rl.graders.sandbox.guards import ProgramLimits
from megatron_rl.graders.sandbox.sandbox import Program, Sandbox, SandboxError
from megatron_rl.rewards.registry import RewardError, register

_ROW_FIELDS = {
    "tests": (
        "tests", "test", "unit_tests", "unit_test", "test_list", "test_code", "test_cases", "asserts", "input_output", "answer",
    ),
    "entry_point": ("entry_point", "function_name", "fn_name"),
    "prompt_code": ("prompt_code", "starter_code", "prompt"),
    "setup": ("setup", "test_setup_code", "test_setup", "test_imports", "setup_code"),
}
"""Field names that data sets use for the parameters that rows set."""
_URL_TRIES = 3
_URL_RETRY_S = 0.2
_MAX_REPLY_BYTES = 1 << 20


def _check_limits(options: Mapping[str, Any]) -> None:
    for name in ("time_limit_s", "memory_limit_mb", "disk_limit_mb", "process_limit", "wall_limit_s"):
        if options.get(name, 1) <= 0:
            raise RewardError(f"reward 'code': option {name} must be above 0, got {options[name]!r}")
    url = options.get("url", "")
    if url and urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise RewardError(f"reward 'code': option url must start with http:// or https://, got {url!r}")
    if url and options.get("partial_credit"):
        raise RewardError("reward 'code': an external sandbox reports only passed or not; omit partial_credit or url")


@dataclass(frozen=True)
class CodeOptions:
    time_limit_s: float = 3.0
    """CPU seconds for program and tests, not counting their imports."""
    wall_limit_s: float = 4.5
    """Wall-clock seconds, including imports. A program that runs until then has failed, or is unscored if it spent more
    than half of them waiting for a busy CPU. reward.timeout_s must be larger."""
    memory_limit_mb: int = 512
    """Limit for the address space of the program, in MiB."""
    disk_limit_mb: int = 16
    """Size of the folder that a program can write to, in MiB."""
    process_limit: int = 64
    """Maximum number of threads; child processes cannot be started."""
    partial_credit: bool = False
    """Score the share of asserts that hold, instead of all or nothing."""
    allow_unsandboxed: bool = False
    """Run with resource limits only if the kernel supports no confinement."""
    preload: str = ""
    """Modules that programs often import, separated by spaces; loaded once."""
    url: str = ""
    """URL of an external sandbox that replaces the built-in one."""

    @property
    def limits(self) -> ProgramLimits:
        return ProgramLimits(
            time_s=self.time_limit_s,
            memory_mb=self.memory_limit_mb,
            disk_mb=self.disk_limit_mb,
            num_processes=self.process_limit,
            wall_s=self.wall_limit_s,
        )


def _prepare(options: Mapping[str, Any]) -> None:
    if options.get("url"):
        import_module("megatron_rl.system.http.json_http")


@register(
    "code", prepare=_prepare, check=_check_limits, range=(0.0, 1.0), row_fields=_ROW_FIELDS, answer_required=False, owns_processes=True
)
def score(
    response: str,
    answer: str = "",
    *,
    tests: str | Sequence[Any] | Mapping[str, Any] = "",
    entry_point: str = "",
    prompt_code: str | Sequence[Any] = "",
    setup: str | Sequence[str] = "",
    options: CodeOptions = CodeOptions(),
) -> Score:
    """Run the response's code with its tests.

    Args:
        response: A whole program, or a continuation of ``prompt_code``; in fenced blocks, or all of the text.
        answer: The tests, if ``tests`` is empty.
        tests: Python source or a list of asserts: statements, ``check(candidate)``, ``test_...`` functions or unittest
            cases. Alternatively cases as data: APPS's {inputs, outputs} or LiveCodeBench's [{input, output, testtype}],
            also as JSON text.
        entry_point: The tested function; needed for ``check(candidate)``, by default taken from ``prompt_code``.
        prompt_code: Code that the response continues, or whose imports and helpers it may use.
        setup: Source that runs before the response and before the tests.
    """
    try:
        program = _program(response, tests or answer, entry_point, prompt_code, setup)
    except ValueError as error:
        return Score(None, error=f"bad tests: {error}")
    if options.url:
        return asyncio.run(_ask_sandbox(options.url, program, options.limits))
    try:
        sandbox = _sandbox(os.getpid(), options.allow_unsandboxed, options.preload)
        outcome = sandbox.run(program, options.limits, partial=options.partial_credit)
    except InvalidTests as error:
        return Score(None, error=f"bad tests: {error}")
    except SandboxError as error:
        return Score(None, error=f"sandbox: {error}")
    return Score(outcome.share if options.partial_credit else float(outcome.passed), outcome.detail)


def _program(response: str, tests: Any, entry_point: Any, prompt_code: Any, setup: Any) -> Program:
    """Build the program of an item. Raises ValueError for row fields that cannot be used."""
    prompt_code = "" if isinstance(prompt_code, list) else prompt_code  # a dialogue contains no code to continue
    setup = setup if isinstance(setup, str) else "\n".join(setup)
    if not all(isinstance(text, str) for text in (entry_point, prompt_code)):
        raise ValueError(f"entry_point and prompt_code: expected text, got {entry_point!r:.40}, {prompt_code!r:.40}")
    if read := read_cases(tests, entry_point):
        cases, entry_point = read
        source, setup = tests_of(cases, entry_point), IMPORTS + setup
        needed = {entry_point} - {""}
    else:
        if not tests or not (isinstance(tests, str) or all(isinstance(test, str) for test in tests)):
            raise ValueError(f"expected source text, a list of asserts, or cases with inputs and outputs, got {tests!r:.80}")
        source = tests if isinstance(tests, str) else "\n".join(tests)
        needed = set() if entry_point or infer_entry_point(prompt_code) else names_of_tests(source, setup)
    return Program(_code(response, entry_point, needed), source, prompt_code, entry_point, setup)


def _code(response: str, entry_point: str, needed: set[str]) -> str:
    """The response's block that defines the entry point. Without an entry point: the last block that defines all names
    that the tests use, or the concatenation of all blocks that define some of them."""
    blocks = fenced_blocks(response)
    if len(blocks) < 2 or entry_point or not needed:
        return _with_helpers(extract_code(response, entry_point), blocks)
    defining = [(block, names) for block in blocks if (names := needed & defined_in(block))]
    whole = [block for block, names in defining if names == needed]
    if whole:
        return _with_helpers(whole[-1], blocks)
    return "\n".join(block for block, _ in defining) or extract_code(response)


def _with_helpers(program: str, blocks: Sequence[str]) -> str:
    """The program after the other blocks that define or import names which it uses and does not bind."""
    used = set(re.findall(r"\w+", program)) - _bound_in(program)
    return "\n".join([*(block for block in blocks if block != program and used & _bound_in(block)), program])


def _bound_in(block: str) -> set[str]:
    imports = re.findall(r"^(?:from\s+\S+\s+)?import\s+(.+)", block, re.MULTILINE)
    return defined_in(block) | set(re.findall(r"\w+", " ".join(imports)))


@functools.lru_cache(maxsize=4)
def _sandbox(pid: int, allow_unsandboxed: bool, preload: str) -> Sandbox:
    """Sandbox of this process; ``pid`` prevents a fork from using its parent's sandbox. The sandbox ends with the
    process."""
    return Sandbox(allow_unsandboxed=allow_unsandboxed, preload=preload.split())


# -------------------------------------------------------------------------------------------------- external sandbox


async def _ask_sandbox(url: str, program: Program, limits: ProgramLimits) -> Score:
    """POST {code, tests, entry_point, prompt_code, setup, time_limit_s, memory_limit_mb}; expects {passed, detail}.

    A failing server is retried and never makes a response fail.
    """
    # Lazy, because it imports aiohttp, which the built-in sandbox does not need.
    from megatron_rl.system.http.json_http import HttpError, HttpSession

    body = {
        "code": program.code,
        "tests": program.tests if isinstance(program.tests, str) else "\n".join(program.tests),
        "entry_point": program.entry_point,
        "prompt_code": program.prompt_code,
        "setup": program.setup,
        "time_limit_s": limits.time_s,
        "memory_limit_mb": limits.memory_mb,
    }
    deadline = time.monotonic() + limits.time_s + 1.0
    error = ""
    async with HttpSession(max_answer_bytes=_MAX_REPLY_BYTES, use_proxy=True) as session:
        for attempt in range(_URL_TRIES):
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                break
            if attempt:
                await asyncio.sleep(min(_URL_RETRY_S, remaining_s))
            try:
                reply = await session.post(url, body, timeout_s=max(remaining_s, 0.1))
                if reply.status == 200:
                    return _read_reply(reply.content)
            except HttpError as failure:
                error = str(failure)
                continue
            except ValueError as failure:
                error = f"{type(failure).__name__}: {failure}"
                continue
            error = f"HTTP {reply.status} {reply.reason}"
            if reply.status < 500 and reply.status != 429:
                break
    return Score(None, error=f"sandbox {url}: {error or 'no reply in time'}")


def _read_reply(body: bytes) -> Score:
    reply = json.loads(body)
    if not isinstance(reply, dict) or not isinstance(reply.get("passed"), bool):
        raise ValueError(f'expected {{"passed": true or false, "detail": text}}, got {body[:80]!r}')
    return Score(float(reply["passed"]), str(reply.get("detail", "")))
