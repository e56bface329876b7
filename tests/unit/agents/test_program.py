"""Programs of users: their limits, their sandbox, and that nothing of them remains."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.agents.program import AgentEnd, AgentLimits, AgentProcess, start_program

PYTHON = sys.executable
LIMITS = AgentLimits(time_limit_s=30, memory_mb=400, num_processes=20, file_mb=4, output_kb=1)


def run(folder: Path, command: list[str], limits: AgentLimits = LIMITS, act=None, **options) -> tuple[AgentEnd, str]:
    workspace, output = folder / "workspace", folder / "output.txt"
    workspace.mkdir(exist_ok=True)

    async def main() -> AgentEnd:
        program = start_program(command, workspace, output, limits, environment=options.pop("environment", {}), **options)
        if act is not None:
            asyncio.get_running_loop().call_later(0.7, act, program)
        return await asyncio.wait_for(program.end(), 60)

    return asyncio.run(main()), output.read_text(errors="replace") if output.exists() else ""


def code(text: str) -> list[str]:
    return [PYTHON, "-c", text]


def alive(folder: Path) -> list[str]:
    """Command lines of processes that work in the folder."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cwd").resolve().is_relative_to(folder.resolve()):
                found.append(Path(f"/proc/{pid}/cmdline").read_text())
    return found


def test_a_program_ends_with_its_code_and_its_output_is_kept(tmp_path):
    end, output = run(tmp_path, code("import sys; print('hello'); print('worse', file=sys.stderr); sys.exit(3)"))
    assert (end.code, end.reason, end.succeeded, end.failure) == (3, "", False, "exit code 3")
    assert output == "hello\nworse\n"
    assert run(tmp_path, ["true"])[0].succeeded


def test_a_command_that_does_not_start_says_why(tmp_path):
    end, _ = run(tmp_path, ["no-such-program"])
    assert not end.succeeded and "no-such-program" in end.failure and "did not start" in end.failure


def test_output_above_the_limit_is_left_out_and_does_not_stop_the_program(tmp_path):
    end, output = run(tmp_path, code("print('x' * 100_000); print('last')"))
    assert end.succeeded and len(output) < 1200 and "the rest is left out" in output


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("x = bytearray(600 << 20)", "exit code 1"),
        ("import os, time\nfor i in range(40):\n    if os.fork() == 0: os.setsid(); time.sleep(9)\ntime.sleep(9)", "num_processes=20"),
        ("import os\nwhile True: os.fork()", "num_processes=20"),
        ("import os, time\nfor i in range(3):\n    if os.fork() == 0: x = b'1' * (200 << 20); break\ntime.sleep(9)", "memory_mb=400"),
        ("open('large', 'wb').write(b'x' * (6 << 20))", "exit code 1"),
        ("import time; time.sleep(100)", "time_limit_s=2"),
        ("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)", "time_limit_s=2"),
    ],
    ids=["memory", "processes", "fork bomb", "memory of all", "file", "time", "ignores the stop"],
)
def test_a_program_above_a_limit_is_stopped_with_the_reason_and_leaves_no_process(tmp_path, text, failure):
    end, _ = run(tmp_path, code(text), replace(LIMITS, time_limit_s=2.0 if "time_limit_s" in failure else 30.0))
    assert not end.succeeded and failure in end.failure
    assert alive(tmp_path) == []


def test_processes_that_a_program_leaves_behind_end_with_it(tmp_path):
    end, _ = run(tmp_path, ["sh", "-c", "(setsid sleep 77 &) ; (sleep 78 &) ; exit 0"])
    assert end.succeeded and alive(tmp_path) == []


def test_a_stopped_program_says_why_it_was_stopped(tmp_path):
    end, _ = run(tmp_path, ["sleep", "100"], act=lambda program: program.stop("the run ends"))
    assert end.failure == "the run ends" and alive(tmp_path) == []


def test_the_end_of_the_process_that_started_it_ends_a_program(tmp_path):
    (tmp_path / "workspace").mkdir()
    text = f"""
import asyncio, os, pathlib
from megatron_rl.agents.program import AgentLimits, start_program
async def main():
    folder = pathlib.Path({str(tmp_path)!r})
    start_program(["sleep", "100"], folder / "workspace", folder / "output.txt", AgentLimits(), environment={{}})
    await asyncio.sleep(1)
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    os.spawnv(os.P_WAIT, PYTHON, [PYTHON, "-c", text])
    deadline = time.monotonic() + 10
    while alive(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive(tmp_path) == []


def test_a_program_ends_with_its_supervisor(tmp_path):
    end, _ = run(tmp_path, ["sleep", "100"], act=lambda program: os.kill(program.pid, signal.SIGKILL))
    deadline = time.monotonic() + 10
    while alive(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert end.failure == "its supervisor was killed" and alive(tmp_path) == []


def test_waiting_time_does_not_count_towards_the_time_limit(tmp_path):
    workspace = tmp_path / "workspace"
    workspace.mkdir()

    async def main(share: float) -> AgentEnd:
        start = time.monotonic()
        program = start_program(["sleep", "2"], workspace, tmp_path / "output.txt", replace(LIMITS, time_limit_s=1.0), environment={})
        return await program.end(lambda: share * (time.monotonic() - start))

    assert asyncio.run(main(0.9)).succeeded
    assert "time_limit_s=1" in asyncio.run(main(0.0)).failure


def test_a_sandboxed_program_writes_in_its_workspace_alone(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    tries = [f"open({str(outside / 'new')!r}, 'w')", f"open({str(outside / 'secret')!r})", "open('/tmp/new', 'w')", "open('/etc/shadow')"]
    for attempt in [*tries, f"os.kill({os.getpid()}, 0)", f"open('/proc/{os.getpid()}/environ').read()"]:
        end, output = run(tmp_path, code(f"import os\nopen('mine', 'w').write('1')\n{attempt}"))
        assert end.code == 1 and ("Permission denied" in output or "Operation not permitted" in output), attempt
    readable = replace(LIMITS, readable=[str(outside)])
    assert run(tmp_path, code(f"print(open({str(outside / 'secret')!r}).read())"), readable) == (AgentEnd(0), "secret\n")
    assert run(tmp_path, code(f"open({str(outside / 'new')!r}, 'w')"), replace(LIMITS, sandbox="none"))[0].succeeded


def test_a_sandboxed_program_connects_to_the_endpoint_alone(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = one.getsockname()[1], two.getsockname()[1]
        text = "import socket, sys\nsocket.create_connection(('127.0.0.1', int(sys.argv[1])), 5); print('yes')"
        outputs = [run(tmp_path, [*code(text), str(port)], port=ports[0])[1] for port in ports]
        assert outputs[0] == "yes\n" and "Permission denied" in outputs[1]
        limits = replace(LIMITS, ports=[ports[1]])
        assert run(tmp_path, [*code(text), str(ports[1])], limits, port=ports[0])[1] == "yes\n"


def test_a_program_gets_a_small_environment_and_files_of_its_command_by_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "secret")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text("import json, os, sys; print(json.dumps([dict(os.environ), os.getcwd()]))")
    end, output = run(tmp_path, [PYTHON, "agent.py"], environment={"OPENAI_API_KEY": "k"})
    assert end.succeeded and "secret" not in output and '"OPENAI_API_KEY": "k"' in output and str(tmp_path / "workspace") in output


def test_the_key_is_not_in_a_command_line(tmp_path):
    seen = []

    def look(program: AgentProcess) -> None:
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                seen.append(Path(f"/proc/{pid}/cmdline").read_text())
        program.stop("seen")

    run(tmp_path, ["sleep", "100"], act=look, environment={"OPENAI_API_KEY": "very-secret-key"})
    assert any("program_supervisor" in line for line in seen) and not any("very-secret-key" in line for line in seen)
