"""The code reward: extraction of code, parsing of tests, HumanEval, rows, an external sandbox."""

import contextlib
import gzip
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data.code_lines import extract_code
from megatron_rl.graders.analysis.source import InvalidTests, compose, infer_entry_point, prelude, read_tests
from megatron_rl.graders.sandbox.values import NotSerializable, decode, encode, write_text
from megatron_rl.rewards.registry import RewardError, check_options, resolve, row_arguments
from megatron_rl.rewards.rules.code import CodeOptions, score
from megatron_rl.rewards.score_file import score_file
from megatron_rl.rewards.workers.calls import RunnerSettings
from megatron_rl.rewards.workers.processes import RewardRunner

DATA = Path(os.environ.get("MEGATRON_RL_DATA", Path(__file__).parents[4] / "../shared/data"))
HUMAN_EVAL = DATA / "humaneval/HumanEval.jsonl.gz"
PROMPT = 'import math\n\ndef helper(x):\n    return x + 1\n\ndef f(x):\n    """Say\n    >>> f(1)\n    """\n'
BODY = "    if x:\n        return math.floor(helper(x))\n    return 0\n"
FULL = PROMPT + BODY


def run_composed(code: str, prompt_code: str, entry_point: str) -> dict:
    namespace: dict = {}
    for part in compose(code, prompt_code, entry_point):
        exec(part, namespace)
    return namespace


# ------------------------------------------------------------------------------------------------------------- source


@pytest.mark.parametrize(
    "response",
    [
        BODY,
        BODY.strip(),
        BODY.rstrip(),
        "if x:\n    return math.floor(helper(x))\nreturn 0",
        FULL,
        FULL.removeprefix("import math\n"),
        "def f(x):\n" + BODY,
        "def helper(x):\n    return x + 1\ndef f(x):\n" + BODY,
        "from math import floor\nf = lambda x: floor(x + 1) if x else 0",
        "class f:\n    def __new__(cls, x): return x + 1 if x else 0",
    ],
)
def test_a_response_is_a_program_or_continues_the_prompt(response: str) -> None:
    function = run_composed(response, PROMPT, "f")["f"]
    assert (function(2), function(0)) == (3, 0)


def test_a_prompt_without_its_last_newline_is_continued_too() -> None:
    assert run_composed(BODY, PROMPT.rstrip(), "f")["f"](2) == 3
    assert run_composed(" x + 1", "def f(x):\n    return", "f")["f"](2) == 3


def test_prompt_without_code_adds_nothing() -> None:
    assert run_composed("def f(x): return x", "Write a function f that returns x.", "f")["f"](2) == 2
    assert prelude("Write a function f.", "f") == [] and infer_entry_point("Write it.") == ""
    assert infer_entry_point(PROMPT) == infer_entry_point("def f(x):") == "f"


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("text", "text"),
        ("Sure:\n```python\na = 1\n```\ndone", "a = 1\n"),
        ("```\na = 1\n```", "a = 1\n"),
        ("```py\na = 1\n```\n```python\nb = 2\n```\n```\noutput\n```", "b = 2\n"),
        ("```python\ndef f(x): pass\n```\nUse it:\n```python\nf(1)\n```", "def f(x): pass\n"),
        ("- item\n  ```python\n  def f(x):\n      return x\n  ```", "def f(x):\n    return x\n"),
        ("```python\na = 1", "a = 1"),
        ("<think>```python\nb = 2\n```</think>```python\na = 1\n```", "a = 1\n"),
        ("<think>maybe</think>a = 1", "a = 1"),
        ("```Python3\na = 1\n```", "a = 1\n"),
        ("```\n```", ""),
    ],
)
def test_code_is_the_last_matching_block(response: str, expected: str) -> None:
    assert extract_code(response, "f") == expected


@given(st.text("`\npy thonf()=:<>/x ", max_size=80), st.text("f\n`:( ", max_size=30))
def test_code_extraction_handles_any_text(response: str, prompt: str) -> None:
    code = extract_code(response, "f")
    assert isinstance(code, str) and len(code) <= len(response)
    prelude(prompt, "f")
    with contextlib.suppress(InvalidTests):
        read_tests(response, prompt_code=prompt)


def test_names_of_tests_lists_the_names_used_from_the_program() -> None:
    tests = read_tests(
        "import math\ny = 2\nassert math.isclose(f(y), helper(y) + Q) and len('a')",
        prompt_code=PROMPT + "# with Q",
        entry_point="f",
    )
    assert tests.names >= {"f", "Q"} and not tests.names & {"helper", "math", "y", "len", "isclose"}
    assert "len" in read_tests("assert len(3)", entry_point="len").names


# ------------------------------------------------------------------------------------------------------------- values

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.fractions()
    | st.decimals(allow_nan=False)
    | st.dates()
    | st.datetimes().map(lambda moment: moment.replace(fold=0))
    | st.times().map(lambda moment: moment.replace(fold=0))
    | st.timedeltas(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner)
        | st.sets(st.integers() | st.text())
        | st.frozensets(st.integers())
    ),
    max_leaves=20,
)


def refuse(value: object) -> list:
    raise NotSerializable(type(value).__name__)


def in_order(value: object) -> str:
    """``repr`` with types, and with sets in sorted order."""
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}[{', '.join(map(in_order, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}[{', '.join(sorted(map(in_order, value)))}]"
    if isinstance(value, dict):
        return f"dict[{', '.join(f'{in_order(key)}: {in_order(item)}' for key, item in value.items())}]"
    return repr(value)


@given(plain)
def test_plain_values_survive_encoding(value: object) -> None:
    (received,), _ = decode(json.loads(write_text(encode([value], refuse, {})[0])), refuse, {})
    assert received == value and in_order(received) == in_order(value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("abistouple", max_size=9),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
)


@given(
    json_values
    | st.tuples(
        st.sampled_from(["list", "dict", "set", "int", "bytes", "decimal", "range", "array", "date", "deque", "tuple"]),
        json_values,
    ).map(list)
)
def test_invalid_messages_raise_value_error(data: object) -> None:
    for message in (
        data,
        {"values": [data], "nodes": []},
        {"values": [[0]], "nodes": [data]},
        {"values": [], "nodes": data},
    ):
        with contextlib.suppress(ValueError):
            decode(message, lambda reference: None, {})


def test_shared_and_cyclic_lists_survive_encoding() -> None:
    inner: list = [1]
    outer = [inner, inner]
    outer.append(outer)
    message, containers = encode([outer], refuse, {})
    (received,), _ = decode(json.loads(write_text(message)), refuse, {})
    assert received[0] is received[1] and received[2] is received
    received[0].append(2)
    after, _ = encode([None], refuse, {}, [received, received[0]])
    decode(json.loads(write_text(after)), refuse, {}, containers)
    assert inner == [1, 2] and outer[0] is inner


# ------------------------------------------------------------------------------------------------------------- reward


def human_eval() -> list[dict]:
    if not HUMAN_EVAL.exists():
        pytest.skip(f"{HUMAN_EVAL} is not here; MEGATRON_RL_DATA names the folder that holds humaneval/")
    with gzip.open(HUMAN_EVAL) as file:
        return [json.loads(line) for line in file]


def test_humaneval_solutions_pass_and_mutated_ones_fail(tmp_path: Path) -> None:
    rows = human_eval()
    others = rows[1:] + rows[:1]
    good = [{**row, "response": row["canonical_solution"]} for row in rows]
    whole = [
        {**row, "response": f"So:\n```python\n{row['prompt']}{row['canonical_solution']}\n```"} for row in rows[:20]
    ]
    bad = [{**row, "response": other["canonical_solution"]} for row, other in zip(rows, others, strict=True)]
    bad += [{**row, "response": "    return None\n"} for row in rows]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*good, *whole, *bad]))
    score_file("code", path, path, timeout_s=60.0, options={"time_limit_s": 20.0, "wall_limit_s": 50.0})
    scored = [json.loads(line) for line in path.open()]
    assert [row["task_id"] for row in scored[: len(good) + len(whole)] if row["score"] != 1.0] == []
    assert [row["task_id"] for row in scored[len(good) + len(whole) :] if row["score"] != 0.0] == []


@pytest.mark.parametrize(
    "row",
    [
        {"tests": "assert f(2) == 4"},
        {"tests": ["assert f(2) == 4", "assert f(3) == 9"]},
        {"test_list": ["assert f(2) == 4"], "test_setup_code": "import math", "prompt": "Square a number."},
        {"test": "def check(candidate):\n    assert candidate(2) == 4", "entry_point": "f", "prompt": "def f(x):\n"},
        {"test": "def check(candidate):\n    assert candidate(2) == 4", "prompt": "def f(x):\n"},
        {"answer": "assert f(2) == 4"},
        {"answer": "f", "tests": "assert f(2) == 4"},
        {"unit_tests": "def test_f():\n    assert f(2) == 4", "setup": None},
        {"tests": "assert f(N) == 4", "setup": "N = 2"},
    ],
)
def test_code_reward_accepts_rows_of_many_data_sets(row: dict) -> None:
    reward = resolve("code")
    for response, value in (("def f(x): return x * x", 1.0), ("def f(x): return x + 3", 0.0)):
        result = score(response, str(row.get("answer", "")), **row_arguments(reward, {}, row))
        assert (result.value, result.error) == (value, ""), result


@pytest.mark.parametrize(
    "fields",
    [{}, {"tests": ""}, {"tests": []}, {"tests": [1]}, {"tests": "assert ("}, {"tests": "a", "entry_point": 1}],
)
def test_untestable_rows_are_unscored(fields: dict) -> None:
    result = score("def f(x): return x", **fields)
    assert result.value is None and result.error


SUM = "n = int(input())\nprint(sum(map(int, input().split())))"
APPS = {"inputs": ["3\n1 2 3\n", "1\n5\n"], "outputs": ["6\n", "5"]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], 7]}
LIVE = [{"input": "3\n1 2 3\n", "output": "6\n", "testtype": "stdin"}]
LIVE_CALLS = [{"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"}]
PATIENT = CodeOptions(time_limit_s=20.0, wall_limit_s=60.0)


@pytest.mark.parametrize(
    ("code", "tests", "value"),
    [
        (SUM, APPS, 1.0),
        (SUM, LIVE, 1.0),
        (f"Read it:\n```python\n{SUM}\n```", APPS, 1.0),
        ("import sys\nprint(sum(map(int, sys.stdin.buffer.read().split()[1:])))", APPS, 1.0),
        ("import os, io\nread = io.BytesIO(os.read(0, os.fstat(0).st_size)).readline\nread()\n"
         "os.write(1, str(sum(map(int, read().split()))).encode())", APPS, 1.0),
        ("import threading\ndef main():\n    input()\n    print(sum(map(int, input().split())))\n"
         "if __name__ == '__main__':\n    threading.Thread(target=main).start()", APPS, 1.0),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split()[1:])))\nsys.exit(0)", APPS, 1.0),
        ("print(6)", APPS, 0.0),
        ("print(6); print(5)", APPS, 0.0),
        ("import os; os._exit(0)", APPS, 0.0),
        ("raise SystemExit(1)", APPS, 0.0),
        ("print(1 / 3)", {"inputs": [""], "outputs": ["0.33333333"]}, 1.0),
        ("print(1000001)", {"inputs": [""], "outputs": ["1000000"]}, 0.0),
        ("print('nan')", {"inputs": [""], "outputs": ["1.5"]}, 0.0),
        ("def add(a, b): return a + b", CALLS, 1.0),
        ("class Solution:\n    def add(self, a: int, b: int) -> Optional[int]: return a + b", CALLS, 1.0),
        ("def add(a, b): return 3", CALLS, 0.0),
        ("def sub(a, b): return 3", CALLS, 0.0),
        ("class Solution:\n    def add(self, xs, n): return tuple(x + n for x in xs)", LIVE_CALLS, 1.0),
        ("class X:\n    def __eq__(self, o): return True\ndef add(*a): return X()", LIVE_CALLS, 0.0),
        ("class X(float):\n    def __eq__(self, o): return True\ndef add(*a): return X()", CALLS, 0.0),
        (SUM, {"inputs": [], "outputs": []}, None),
        (SUM, {"inputs": ["1"], "outputs": []}, None),
        (SUM, [{"input": "1"}], None),
        (SUM, {"inputs": [3], "outputs": ["1"]}, None),
    ],
)  # fmt: skip
def test_cases_of_apps_and_livecodebench_are_graded(code: str, tests: object, value: float | None) -> None:
    for form in (tests, json.dumps(tests)):
        result = score(code, tests=form, entry_point="add" if tests is LIVE_CALLS else "", options=PATIENT)
        assert result.value == value, result


@pytest.mark.parametrize(
    ("response", "tests", "value"),
    [
        ("```python\ndef f(x): return x * x\n```\nUse it:\n```python\nprint(f(input()))\n```", "assert f(2) == 4", 1.0),
        (
            "```python\ndef f(x): return x\n```\nBetter:\n```python\ndef f(x): return x * x\n```",
            "assert f(2) == 4",
            1.0,
        ),
        ("```python\ndef f(x): return x * x\n```\nWorse:\n```python\ndef f(x): return x\n```", "assert f(2) == 4", 0.0),
        (
            "```python\ndef f(x): return x * x\n```\nThen\n```python\ndef g(x): return f(x) + 1\n```",
            "assert g(f(2)) == 17",
            1.0,
        ),
        ("```python\ny = 2\n```", "assert f(2) == 4", 0.0),
    ],
)
def test_blocks_that_define_the_tested_names_are_used(response: str, tests: str, value: float) -> None:
    assert score(response, tests=tests, options=PATIENT).value == value


def test_partial_credit_is_the_share_of_asserts() -> None:
    tests = ["assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 9"]
    assert score("def f(x): return x", tests=tests, options=CodeOptions(partial_credit=True)).value == pytest.approx(
        2 / 3
    )
    assert score("def f(x): return x", tests=tests).value == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time_limit_s": 0}, "time_limit_s"),
        ({"memory_limit_mb": -1}, "memory_limit_mb"),
        ({"url": "localhost"}, "http"),
        ({"url": "http://x", "partial_credit": True}, "partial_credit"),
        ({"time_limit": 3}, "time_limit"),
        ({"process_limit": "many"}, "integer"),
    ],
)
def test_invalid_code_options_are_rejected_before_the_run(options: dict, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        check_options(resolve("code"), options, ["tests"])


def test_workers_score_hostile_programs_and_leave_no_process() -> None:
    loop = "def f(x):\n    while True: pass"
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    square = "def f(x): return x * x"
    items = [
        (code, "", {"tests": "assert f(3) == 9"}) for code in (square, loop, square, bomb, "import os; os._exit(0)")
    ]
    options = {"time_limit_s": 0.3, "wall_limit_s": 20.0}
    with RewardRunner("code", RunnerSettings(timeout_s=30.0), options=options, row_fields=["tests"]) as runner:
        scores = runner.submit(items).result()
        assert [result.value for result in scores] == [1.0, 0.0, 1.0, 0.0, 0.0], scores
    assert helpers_below(os.getpid()) == []


def helpers_below(pid: int) -> list[int]:
    """Sandbox supervisors among the descendants of a process, except this process's own."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])

    def is_helper(candidate: int) -> bool:
        with contextlib.suppress(OSError):
            return "sandbox.supervisor" in Path(f"/proc/{candidate}/cmdline").read_text()
        return False

    found = []
    for candidate in filter(is_helper, parents):
        ancestor, below = parents[candidate], candidate
        while ancestor not in (0, pid):
            ancestor, below = parents.get(ancestor, 0), ancestor
        if ancestor == pid and not is_helper(below):
            found.append(candidate)
    return found


# -------------------------------------------------------------------------------------------------- external sandbox


class FakeSandbox(BaseHTTPRequestHandler):
    """Fake sandbox: passes code that contains the word ``right`` and runs nothing."""

    requests: ClassVar[list[dict]] = []
    num_failures = 0

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(request)
        if type(self).num_failures > 0:
            type(self).num_failures -= 1
            self.send_error(503)
            return
        body = {"nonsense": b"[]", "no json": b"<html>"}.get(request["code"])
        body = body or json.dumps({"passed": "right" in request["code"], "detail": "said so"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeSandbox)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    FakeSandbox.requests.clear()
    FakeSandbox.num_failures = 0
    try:
        yield f"http://127.0.0.1:{server.server_port}/run"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_an_external_sandbox_decides(url: str) -> None:
    result = score(
        "```python\nright\n```", tests=["assert a", "assert b"], options=CodeOptions(url=url, memory_limit_mb=100)
    )
    assert (result.value, result.detail) == (1.0, "said so")
    assert score("wrong", tests="assert a", options=CodeOptions(url=url)).value == 0.0
    sent = FakeSandbox.requests[0]
    assert (sent["code"], sent["tests"], sent["memory_limit_mb"]) == ("right\n", "assert a\nassert b", 100)


def test_failing_external_sandbox_is_retried_and_never_fails_a_response(url: str) -> None:
    FakeSandbox.num_failures = 2
    assert score("right", tests="assert a", options=CodeOptions(url=url)).value == 1.0
    FakeSandbox.num_failures = 100
    result = score("right", tests="assert a", options=CodeOptions(url=url))
    assert result.value is None and "503" in result.error
    FakeSandbox.num_failures = 0
    for code in ("nonsense", "no json"):
        assert score(code, tests="assert a", options=CodeOptions(url=url)).value is None
    assert score("right", tests="assert a", options=CodeOptions(url="http://127.0.0.1:9/run")).value is None
