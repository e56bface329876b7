"""What runs in a confined process: the tested code (``play``), its tests (``referee``), or both in one (``together``).

A verdict is a JSON object: ``kind`` is "ran" (with ``num_passed``, ``num_failed`` and ``detail``), "bad_tests" (the data is at fault) or
"inseparable" (the tests must run in the interpreter of the tested code).

Invariants: all assertions of the tests must have been reached and held for a verdict without failures; tests that ended
early for any reason have failed. Under ``referee`` the tested code has no way to the verdict: it is in another process,
which knows neither the tests nor the channel. Under ``together`` it shares an interpreter with the tests; the verdict is
then signed with a key that is read after the tested code was loaded, which stops programs that exit, print or patch,
and not one that searches the interpreter for it.
"""

import contextlib
import json
import random
import socket
import sys
import types
import unittest
from collections.abc import Sequence
from typing import Any

from megatron_rl.rewards.sandbox.peer import Gone, Player, Referee, describe_exception
from megatron_rl.rewards.sandbox.source import BadTests, Tests, compose, infer_entry_point, prelude, read_tests

_MAX_DETAIL = 300
Verdict = dict[str, Any]


def _load_program(program: dict[str, str]) -> dict[str, Any]:
    """Run the tested code's module level. Returns its namespace; raises whatever it raises."""
    random.seed(0)  # a grade must not depend on luck
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    entry_point = program["entry_point"] or infer_entry_point(program["prompt_code"])
    if program["setup"]:
        exec(compile(program["setup"], "<setup>", "exec"), module.__dict__)
    for code in compose(program["code"], program["prompt_code"], entry_point):
        exec(code, module.__dict__)
    return module.__dict__


def play(program: dict[str, str], connection: socket.socket) -> None:
    """Load the tested code, say how that went, and serve the referee until it is gone."""
    player = Player(connection, {})
    try:
        namespace = _load_program(program)
    except BaseException as error:
        player.send({"loaded": False, "raise": describe_exception(error)})
        return
    player = Player(connection, namespace)
    player.send({"loaded": True})
    with contextlib.suppress(Gone):
        player.serve()


def _read_task(channel: socket.socket) -> dict[str, Any]:
    """What the client wrote for the referee: JSON up to the end of its stream."""
    parts = []
    while part := channel.recv(1 << 16):
        parts.append(part)
    return json.loads(b"".join(parts))


def referee(channel: socket.socket, connection: socket.socket) -> None:
    """Run the tests against a player, and write the verdict."""
    task = _read_task(channel)
    channel.sendall(json.dumps(_verdict_of_tests(task, connection)).encode())


def _verdict_of_tests(task: dict[str, Any], connection: socket.socket) -> Verdict:
    random.seed(0)
    try:
        tests, entry_point = _tests_of(task)
    except BadTests as error:
        return {"kind": "bad_tests", "detail": str(error)}
    if tests.one_interpreter:
        return {"kind": "inseparable", "detail": "the tests look into the interpreter"}
    peer = Referee(connection)
    try:
        hello = peer.receive()
    except Gone as gone:
        return _failed(tests, str(gone))
    if not hello.get("loaded"):
        return _failed(tests, _one_line(hello.get("raise")))
    namespace: dict[str, Any] = {"__name__": "tests"}
    try:
        for code in prelude(task["prompt_code"], entry_point):
            exec(code, namespace)
        if task["setup"]:
            exec(compile(task["setup"], "<setup>", "exec"), namespace)
    except Exception as error:
        return {"kind": "bad_tests", "detail": f"the prompt or the set-up fails without the response: {error!r}"}
    namespace.update({name: peer.name(name) for name in tests.names})
    if entry_point and "candidate" in tests.names:
        namespace["candidate"] = peer.name(entry_point)
    solution = types.ModuleType("solution")
    vars(solution)["__getattr__"] = peer.name  # for ``from solution import ...``
    sys.modules["solution"] = solution
    verdict = run_tests(tests, namespace)
    if peer.unsendable:
        return {"kind": "inseparable", "detail": f"the tests give the program {peer.unsendable}"}
    return verdict


def together(program: dict[str, str], channel: socket.socket) -> None:
    """Run tested code and tests in this interpreter, and write the signed verdict."""
    send, dumps = channel.sendall, json.dumps  # taken before the tested code can patch them
    error: BaseException | None = None
    namespace: dict[str, Any] = {}
    try:
        namespace = _load_program(program)
    except BaseException as raised:
        error = raised
    task = _read_task(channel)
    try:
        tests, entry_point = _tests_of(task)
    except BadTests as bad:
        send(dumps({"kind": "bad_tests", "detail": str(bad), "key": task["key"]}).encode())
        return
    if error is not None:
        verdict = _failed(tests, _one_line(describe_exception(error)))
    else:
        namespace = {**namespace, "__name__": "tests"}
        if entry_point in namespace:
            namespace.setdefault("candidate", namespace[entry_point])
        verdict = run_tests(tests, namespace)
    send(dumps({**verdict, "key": task["key"]}).encode())


def _tests_of(task: dict[str, Any]) -> tuple[Tests, str]:
    entry_point = task["entry_point"] or infer_entry_point(task["prompt_code"])
    tests = read_tests(
        task["tests"],
        setup=task["setup"],
        prompt_code=task["prompt_code"],
        entry_point=entry_point,
        partial=task["partial"],
    )
    return tests, entry_point


def _failed(tests: Tests, detail: str) -> Verdict:
    return {"kind": "ran", "num_passed": 0, "num_failed": max(tests.num_asserts, 1), "detail": detail[:_MAX_DETAIL]}


def _one_line(description: Any) -> str:
    """ "ValueError: text" of what ``describe_exception`` wrote."""
    if isinstance(description, Sequence) and len(description) == 3:
        return f"{description[0]}: {description[2]}".rstrip(": ")
    return "the program sent something that is no answer"


# -------------------------------------------------------------------------------------------------------------- tests


class _Cases:
    """Counts the asserts of tests with partial credit; ``with cases: assert ...`` swallows a failure."""

    def __init__(self) -> None:
        self.num_passed = 0
        self.failures: list[BaseException] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if error is None:
            self.num_passed += 1
        elif isinstance(error, Exception):
            self.failures.append(error)
        return isinstance(error, Exception)


def run_tests(tests: Tests, namespace: dict[str, Any]) -> Verdict:
    """Execute tests in ``namespace``. Whatever ends them early is a failure."""
    cases = _Cases()
    namespace["__case__"] = cases
    error: BaseException | None = None
    try:
        exec(tests.code, namespace)
        for name in tests.functions:
            _run_function(namespace[name])
    except BaseException as raised:
        error = raised
    failures = cases.failures + ([error] if error is not None else [])
    if not failures:
        return {"kind": "ran", "num_passed": max(cases.num_passed, tests.num_asserts, 1), "num_failed": 0, "detail": ""}
    num_known = cases.num_passed + len(cases.failures)
    num_failed = len(cases.failures) + (max(tests.num_asserts - num_known, 1) if error is not None else 0)
    detail = _describe_failure(failures[0], tests)
    return {"kind": "ran", "num_passed": cases.num_passed, "num_failed": num_failed, "detail": detail[:_MAX_DETAIL]}


def _run_function(function: Any) -> None:
    if not isinstance(function, type):
        function()
        return
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(function).run(result)
    broken = [*result.failures, *result.errors]
    if broken or result.unexpectedSuccesses or not result.testsRun:
        last_line = broken[0][1].strip().splitlines()[-1] if broken else "no test succeeded"
        raise AssertionError(last_line)


def _describe_failure(error: BaseException, tests: Tests) -> str:
    """The exception, and the line of the tests that it came from."""
    line, traceback = 0, error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<tests>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    source = tests.lines[line - 1].strip() if 0 < line <= len(tests.lines) else ""
    text = str(error) if isinstance(error, Gone) else _one_line(describe_exception(error))
    return f"{text} at {source!r}" if source else text
