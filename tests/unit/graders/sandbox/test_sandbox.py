"""The sandbox: correct programs pass, hostile ones fail within their limits, and no process or file of them is left."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.graders.analysis.source import InvalidTests
from megatron_rl.graders.sandbox import sandbox as sandbox_module
from megatron_rl.graders.sandbox.guards import ProgramLimits
from megatron_rl.graders.sandbox.sandbox import CaseResult, Program, Sandbox, SandboxError
from tests.unit.graders.sandbox.honest_programs import HONEST, INSEPARABLE, NODES, OPERATED
from tests.unit.graders.sandbox.hostile_programs import CHEATS, FORGED, GUARDED, LOOPS, MEMORY, SURVIVORS

LIMITS = ProgramLimits(time_s=0.5, memory_mb=200, disk_mb=8, num_processes=12, wall_s=20.0)
PATIENT = replace(LIMITS, time_s=15.0)
"""Limits for programs that end without being killed, on a busy machine."""
TESTS = "assert f(2) == 4\nassert f(0) == 0"
SQUARE = "def f(x):\n    return x * x\n"
MARK = "31557601"
"""Argument of the programs that hostile code starts."""


@pytest.fixture(scope="module", params=["namespaces", "filter"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(level=request.param) as sandbox:
        start(sandbox)
        yield sandbox


def start(sandbox: Sandbox) -> None:
    try:
        sandbox.start()
    except SandboxError as error:
        pytest.skip(f"this kernel cannot: {error}")


def command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def survivors(sandbox: Sandbox) -> list[int]:
    """Processes started by a program of ``sandbox``: forks of the supervisor, or processes with the mark."""
    below = {sandbox.pid}
    parents = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parents[int(pid)] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    for _ in range(4):
        below |= {pid for pid, parent in parents.items() if parent in below}
    # Bubblewrap is two processes around the supervisor; without it the supervisor has one.
    num_own = (3 if shutil.which("bwrap") else 2) if sandbox.level == "namespaces" else 1
    extra = [pid for pid in sorted(below) if command(str(pid))][num_own:]
    return extra + [pid for pid in parents if MARK.encode() in command(str(pid))]


def run(
    sandbox: Sandbox,
    code: str,
    tests: str = TESTS,
    *,
    limits: ProgramLimits = PATIENT,
    entry_point: str = "f",
    prompt_code: str = "",
    is_scored: bool = True,
) -> CaseResult:
    """Run a program and check that no process of it is left. An unscored program has no ``num_failed``."""
    try:
        outcome = sandbox.run(Program(code, tests, prompt_code, entry_point), limits)
    except InvalidTests as error:
        if is_scored:
            raise
        outcome = CaseResult(0, -1, str(error))
    assert survivors(sandbox) == []
    return outcome


def test_correct_program_passes_and_a_wrong_one_reports_the_line(sandbox: Sandbox) -> None:
    assert run(sandbox, SQUARE) == CaseResult(2, 0, "")
    wrong = run(sandbox, "def f(x):\n    return x + x + (x == 0)\n")
    assert not wrong.passed and "assert f(0) == 0" in wrong.detail
    assert "ZeroDivisionError" in run(sandbox, "def f(x):\n    return 1 / (x - 2)\n").detail


@pytest.mark.parametrize("name", CHEATS)
def test_cheating_programs_do_not_pass(sandbox: Sandbox, name: str) -> None:
    outcome = run(sandbox, CHEATS[name], is_scored=False)
    assert not outcome.passed and outcome.detail
    assert run(sandbox, SQUARE).passed


@pytest.mark.parametrize("name", LOOPS)
def test_program_that_does_not_end_fails_at_the_limit(sandbox: Sandbox, name: str) -> None:
    outcome = run(sandbox, LOOPS[name], limits=LIMITS)
    assert not outcome.passed and "limit" in outcome.detail


@pytest.mark.parametrize("name", SURVIVORS)
def test_nothing_survives_a_program(sandbox: Sandbox, name: str) -> None:
    assert not run(sandbox, SURVIVORS[name], limits=LIMITS).passed
    assert run(sandbox, SQUARE).passed


@pytest.mark.parametrize("name", MEMORY)
def test_memory_is_limited(sandbox: Sandbox, name: str) -> None:
    outcome = run(sandbox, MEMORY[name], limits=LIMITS)
    assert not outcome.passed
    assert "limit" in outcome.detail or "not permitted" in outcome.detail


@pytest.mark.parametrize("name", GUARDED)
def test_program_cannot_access_anything_outside_the_sandbox(sandbox: Sandbox, name: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        attempt = GUARDED[name].format(port=server.getsockname()[1], secret=str(secret))
        indented = attempt.replace("\n", "\n        ")
        outcome = run(
            sandbox,
            f"def f(x):\n    try:\n        {indented}\n    except (OSError, ValueError):\n        return x * x\n    return 5",
        )
        server.settimeout(0.01)
        with pytest.raises(TimeoutError):
            server.accept()
    assert outcome.passed or "limit" in outcome.detail or "ended" in outcome.detail, outcome
    assert os.listdir(tmp_path) == ["secret"]
    assert secret.read_text() == "secret"


def test_the_environment_is_scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "secret")
    with Sandbox() as fresh:
        program = Program("import os\ndef f(): return dict(os.environ)", "assert 'SECRET_TOKEN' not in f()")
        assert fresh.run(program, PATIENT).passed


def test_each_program_has_its_own_empty_folder(sandbox: Sandbox) -> None:
    look = "import os\nbefore = os.listdir('.')\nos.makedirs('a/b')\nopen('a/b/c', 'w').write('x')\n"
    look += "os.mkdir('a/d', 0)\nos.mkdir('d', 0)\ndef f(): return before"
    for _ in range(2):
        assert run(sandbox, look, "assert f() == []").passed
    where = "import os, tempfile\ndef f():\n    with tempfile.NamedTemporaryFile() as file:\n"
    where += "        return os.path.expanduser('~') == os.getcwd() == os.path.dirname(file.name)"
    assert run(sandbox, where, "assert f()").passed


def test_tests_that_cannot_run_are_reported_as_bad_tests(sandbox: Sandbox) -> None:
    for tests in ("assert f(", "", "# nothing", "x = 1", "def check(candidate):\n    assert candidate(1) == 1"):
        with pytest.raises(InvalidTests):
            run(sandbox, SQUARE, tests, entry_point="")


@pytest.mark.parametrize("name", HONEST)
def test_tests_use_the_program_as_in_one_interpreter(sandbox: Sandbox, name: str) -> None:
    code, tests = HONEST[name]
    outcome = run(sandbox, code, tests, entry_point="f" if "candidate" in tests else "")
    assert outcome.passed and outcome.detail == ""


@pytest.mark.parametrize("name", OPERATED)
def test_tests_that_a_program_object_would_decide_are_unscored(sandbox: Sandbox, name: str) -> None:
    code, tests = OPERATED[name]
    outcome = run(sandbox, code, tests, entry_point="", is_scored=False)
    assert outcome.num_failed == -1 and "plain value" in outcome.detail, outcome


@pytest.mark.parametrize("name", INSEPARABLE)
def test_tests_that_cannot_run_are_unscored_for_any_program(sandbox: Sandbox, name: str) -> None:
    code, tests = INSEPARABLE[name]
    for program in (code, "", "raise SystemExit", "def f(*a): return 1"):
        with pytest.raises(InvalidTests):
            run(sandbox, program, tests, entry_point="")


def test_instances_of_prompt_classes_are_sent_as_attributes(sandbox: Sandbox) -> None:
    code = "class Solution:\n    def turn(self, head):\n        last = None\n        while head:\n"
    code += "            head.next, last, head = last, head, head.next\n        return last"
    tests = (
        "def check(candidate):\n    long = list(range(2000))\n    assert values(candidate(build(long))) == long[::-1]"
    )
    assert run(sandbox, code, tests, prompt_code=NODES, entry_point="Solution().turn").passed
    code = "def f(n):\n    a = Node(1); a.next = a; return a"
    tests = "a = f(0)\nassert a.next.next.value == 1 and a.next is a"
    assert run(sandbox, code, tests, prompt_code=NODES).passed


@pytest.mark.parametrize("name", FORGED)
def test_program_objects_cannot_decide_their_own_comparison(sandbox: Sandbox, name: str) -> None:
    code, tests = FORGED[name]
    outcome = run(sandbox, code, tests, is_scored=False)
    assert not outcome.passed, outcome


@pytest.mark.parametrize(
    "tests",
    [
        "def test_a():\n    assert f(2) == 5",
        "import unittest\nclass TestF(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(f(2), 5)",
        "f(2) == 5",
        "def check(candidate):\n    assert candidate(2) == 5",
        "def check(candidate):\n    assert candidate(2) == 5\ncheck(f)",
        "assert g(2) == 4",
        "a = [1]\nf(a)",
    ],
)
def test_failing_tests_fail_in_every_form(sandbox: Sandbox, tests: str) -> None:
    if tests == "a = [1]\nf(a)":
        tests += "\nassert a"
    assert not run(sandbox, SQUARE, tests).passed


def test_partial_credit_counts_asserts(sandbox: Sandbox) -> None:
    tests = "assert f(1) == 1\nassert f(2) == 5\nassert f(3) == 9\nassert 1 / (f(0)) == 1"
    program = Program(SQUARE, tests, entry_point="f")
    assert sandbox.run(program, PATIENT, partial=True).share == 0.5
    assert sandbox.run(program, PATIENT).share == 0.0
    raising = Program("def f(x): return x * x if x < 3 else 1 / 0", tests, entry_point="f")
    assert sandbox.run(raising, PATIENT, partial=True).share == 0.25
    early = Program("import os\ndef f(x): return x if x < 2 else os._exit(0)", tests, entry_point="f")
    assert sandbox.run(early, PATIENT, partial=True).share == 0.25


def test_prompt_helpers_come_from_the_prompt_not_the_program(sandbox: Sandbox) -> None:
    prompt = 'import math\n\ndef near(a, b):\n    return abs(a - b) < 1e-6\n\ndef f(x):\n    """Root."""\n'
    tests = "def check(candidate):\n    assert near(candidate(4), 2)\n    assert near(candidate(9), 3)"
    assert run(sandbox, "    return math.sqrt(x)\n", tests, prompt_code=prompt).passed
    cheat = "def near(a, b): return True\ndef f(x): return 0"
    assert not run(sandbox, cheat, tests, prompt_code=prompt).passed


def test_many_callers_share_a_sandbox(sandbox: Sandbox) -> None:
    outcomes: dict[int, bool] = {}

    def ask(number: int) -> None:
        code = SQUARE if number % 2 else "def f(x): return 0"
        outcomes[number] = sandbox.run(Program(code, TESTS, entry_point="f"), PATIENT).passed

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {number: bool(number % 2) for number in range(8)}


def test_lost_supervisor_is_replaced() -> None:
    with Sandbox() as fresh:
        assert fresh.run(Program(SQUARE, TESTS), PATIENT).passed
        first = fresh.pid
        os.kill(fresh.pid, signal.SIGKILL)
        os.waitid(os.P_PID, fresh.pid, os.WEXITED | os.WNOWAIT)
        assert fresh.run(Program(SQUARE, TESTS), PATIENT).passed
        assert fresh.pid != first


def test_all_processes_end_with_a_killed_supervisor(sandbox: Sandbox) -> None:
    threading.Timer(0.3, os.kill, (sandbox.pid, signal.SIGKILL)).start()
    endless = "import os, time\ntry: os.fork()\nexcept OSError: pass\nwhile True: pass"
    outcome = sandbox.run(Program(endless, TESTS), ProgramLimits(time_s=1.0, wall_s=20.0))
    assert not outcome.passed  # the second helper ran it to its limit
    deadline = time.monotonic() + 10
    while left := survivors(sandbox):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def test_all_processes_end_with_a_killed_client() -> None:
    script = (
        "from megatron_rl.graders.sandbox.sandbox import *\n"
        "s = Sandbox(); s.start(); print(s.pid, flush=True)\n"
        "s.run(Program('import time\\ntime.sleep(1000)', 'assert f()'), ProgramLimits(time_s=100, wall_s=100))\n"
    )
    client = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    helper = int(client.stdout.readline())
    time.sleep(0.3)
    own = command(str(helper))
    assert own, "the helper has ended before its client"
    client.kill()
    client.wait()
    client.stdout.close()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        left = [pid for pid in os.listdir("/proc") if pid.isdigit() and command(pid) == own]
        if not left:
            return
        time.sleep(0.02)
    pytest.fail(f"alive after their client: {left}")


def test_folders_of_killed_supervisors_are_removed() -> None:
    memory = Path("/dev/shm")
    if shutil.disk_usage(memory).free < 512 << 20:
        pytest.skip("/dev/shm is too small to be the sandbox's folder")
    old, living = (memory / f"megatron_rl_sandbox_{pid}_x" for pid in (4_000_000_000, os.getpid()))
    for folder in (old, living):
        folder.mkdir()
    deep = os.open(old, os.O_RDONLY)
    for _ in range(3000):  # longer than any path may be
        os.mkdir("d", dir_fd=deep)
        deep, above = os.open("d", os.O_RDONLY, dir_fd=deep), deep
        os.close(above)
    os.close(deep)
    with Sandbox(level="filter") as sandbox:
        start(sandbox)
        assert sandbox.run(Program(SQUARE, TESTS), PATIENT).passed
        assert not old.exists() and living.exists()
        folders = set(memory.glob(f"megatron_rl_sandbox_{sandbox.pid}_*"))
        assert len(folders) == 1
    living.rmdir()
    assert not folders.pop().exists()


def test_namespaces_hold_without_bubblewrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with Sandbox(level="namespaces") as own:
        start(own)
        test_correct_program_passes_and_a_wrong_one_reports_the_line(own)
        test_each_program_has_its_own_empty_folder(own)
        for name in GUARDED:
            test_program_cannot_access_anything_outside_the_sandbox(own, name, tmp_path)
        for name in SURVIVORS:
            test_nothing_survives_a_program(own, name)
        test_all_processes_end_with_a_killed_supervisor(own)


def test_preloaded_modules_are_available() -> None:
    with Sandbox(preload=["numpy"]) as sandbox:
        code = "import sys\nloaded = 'numpy' in sys.modules\ndef f(): return loaded"
        assert sandbox.run(Program(code, "assert f()"), PATIENT).passed


def test_sandbox_refuses_to_run_without_any_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "LEVELS", ())
    with Sandbox() as closed, pytest.raises(SandboxError, match="allow_unsandboxed"):
        closed.run(Program(SQUARE, TESTS), PATIENT)
    with Sandbox(allow_unsandboxed=True) as opened:
        assert opened.run(Program(SQUARE, TESTS), PATIENT).passed
        assert opened.level == "none"
        for name in ("leaves a daemon", "leaves another program"):
            assert not run(opened, SURVIVORS[name], limits=LIMITS).passed
        assert not run(opened, LOOPS["ignores signals"], limits=LIMITS).passed
