"""Runs one program of a user within limits: a script of its own process (``program.py`` starts it), with the standard library only.

It reads a line of JSON (``main``) from its standard input, runs the program, and writes a line of JSON with the program's end.
Invariants: when this process ends, the program and all that it started have ended, also if they made sessions of their own;
the end of standard input (the trainer stopped, or died) stops the program. ``PR_SET_CHILD_SUBREAPER`` makes orphans children of
this process. If it is killed, the kernel kills the program. Resource limits hold for each process of the program; the number of
processes and their memory are counted.

``sandbox`` "files" is Landlock: the program reads the given paths, writes in its own folders, and, as far as the kernel can
(6.7 and 6.12), connects to the endpoint's and the given ports alone and signals its own processes alone.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import time

_CHECK_S = 0.2
_TERM_S = 2.0
"""Seconds between the request to stop, which a container's client passes on, and the kill."""
_KILL_S = 10.0
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ, _WRITE_FILE, _DEVICE_CALLS = 0b1101, 0b10, 1 << 15
_FILE_RIGHTS = 0b111 | 1 << 14 | _DEVICE_CALLS
"""Rights that a rule for a single file may have; execute, write, read, truncate, device calls."""
_SIGNAL_AT_PARENTS_DEATH, _SUBREAPER, _NO_NEW_PRIVILEGES = 1, 36, 38
_DEVICES = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty")]
_PROC = [f"/proc/{name}" for name in ("cpuinfo", "meminfo", "stat", "sys", "version", "filesystems", "loadavg")]
_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Settings: command, folder, environment, output (a file), output_bytes, memory_mb, file_mb, num_processes, sandbox, readable,
    writable (paths), ports (none: any)."""
    settings = json.loads(sys.stdin.buffer.readline())
    _call("prctl", _SUBREAPER, 1, 0, 0, 0)
    report = {"code": 0, "reason": ""}
    try:
        code, reason = _run(settings)
        report = {"code": code, "reason": reason}
    except (OSError, subprocess.SubprocessError) as error:
        report = {"code": 127, "reason": f"the command did not start: {error}"}
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(report), flush=True)


def _run(settings: dict) -> tuple[int, str]:
    """Return the program's exit code and the reason why it was stopped; an empty reason if it ended by itself."""
    ruleset = _ruleset(settings) if settings["sandbox"] == "files" else None

    def confine() -> None:
        _call("prctl", _SIGNAL_AT_PARENTS_DEATH, signal.SIGKILL, 0, 0, 0)
        for what, value in (
            (resource.RLIMIT_DATA, settings["memory_mb"] << 20),  # not the address space, of which some runtimes reserve much
            (resource.RLIMIT_FSIZE, settings["file_mb"] << 20),
            (resource.RLIMIT_CORE, 0),
        ):
            ceiling = resource.getrlimit(what)[1]
            value = value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)
            resource.setrlimit(what, (value, value))
        if ruleset is not None:
            _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
            _call("syscall", _RESTRICT_SELF, ruleset, 0)

    program = subprocess.Popen(
        settings["command"],
        cwd=settings["folder"],
        env=settings["environment"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=confine,
    )
    reason = _watch(program, settings)
    if reason and program.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(_TERM_S)
    _kill_all(program)
    return program.wait(_KILL_S), reason


def _watch(program: subprocess.Popen, settings: dict) -> str:
    """Copy the output until the program ends or must stop; return why it must stop."""
    assert program.stdout is not None
    pipe, room = program.stdout.fileno(), settings["output_bytes"]
    os.set_blocking(pipe, False)
    open_pipes = [sys.stdin.fileno(), pipe]
    next_check_s = 0.0
    with open(settings["output"], "wb", buffering=0) as output:
        while True:
            ended = program.poll() is not None  # before the pipe is read, so that the last lines are read after the end
            readable, _, _ = select.select(open_pipes, [], [], 0.0 if ended else _CHECK_S)
            if sys.stdin.fileno() in readable and not os.read(sys.stdin.fileno(), 4096):
                return "stopped"
            if pipe in readable:
                part = os.read(pipe, 1 << 16)
                if not part:
                    open_pipes.remove(pipe)
                if len(part) > room >= 0:
                    output.write(part[:room] + f"\n[the rest is left out: more than {settings['output_bytes']} bytes]\n".encode())
                elif room >= 0:
                    output.write(part)
                room -= len(part)
            elif ended:
                return ""
            if time.monotonic() >= next_check_s:
                next_check_s = time.monotonic() + _CHECK_S
                if reason := _excess(settings):
                    return reason


def _excess(settings: dict) -> str:
    pids = _descendants()
    if len(pids) > settings["num_processes"]:
        return f"{len(pids)} processes at a time; the limit is num_processes={settings['num_processes']}"
    page, resident = resource.getpagesize(), 0
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/statm") as file:
            resident += int(file.read().split()[1]) * page
    if resident > settings["memory_mb"] << 20:
        return f"{resident >> 20} MiB of memory; the limit is memory_mb={settings['memory_mb']}"
    return ""


def _descendants() -> list[int]:
    """Ids of all processes below this one; from the kernel's lists of children, because a scan of /proc is slow among many."""
    found, waiting = [], [os.getpid()]
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as file:
                    children = [int(word) for word in file.read().split()]
                found += children
                waiting += children
    return found


def _kill_all(program: subprocess.Popen) -> None:
    """Kill every process of the program. Repeated, because one may start another meanwhile: all are stopped first."""
    deadline_s = time.monotonic() + _KILL_S
    while (pids := _descendants()) and time.monotonic() < deadline_s:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        program.poll()
        with contextlib.suppress(ChildProcessError):
            # The program itself is left to Popen; others have become children of this process.
            for pid in pids:
                if pid != program.pid:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(pid, os.WNOHANG)
        time.sleep(0.005)


def _ruleset(settings: dict) -> int:
    """Return a Landlock ruleset. Raises OSError if the kernel has none."""
    try:
        abi = _call("syscall", _CREATE_RULESET, None, 0, 1)
    except OSError as error:
        raise OSError(f"sandbox=files needs Landlock (Linux 5.13): {error}; set sandbox=none or a container command") from error
    rights = (1 << 13) - 1
    for needed, bit in ((2, 13), (3, 14), (5, 15)):
        rights |= (abi >= needed) << bit
    confines_ports = abi >= 4 and settings["ports"]
    # struct landlock_ruleset_attr: files; TCP bind and connect; abstract Unix sockets and signals.
    fields = [rights, 0b10 if confines_ports else 0, 0b11 if abi >= 6 else 0]
    attributes = struct.pack(f"{3 if abi >= 6 else 2 if abi >= 4 else 1}Q", *fields[: 3 if abi >= 6 else 2 if abi >= 4 else 1])
    ruleset = _call("syscall", _CREATE_RULESET, attributes, len(attributes), 0)
    # Not the whole of /proc, which shows the environment of the run's processes.
    for path in (*settings["readable"], *_PROC, *_DEVICES):
        _allow(ruleset, path, rights & (_READ | (_WRITE_FILE | _DEVICE_CALLS if path.startswith("/dev/") else 0)))
    for path in settings["writable"]:
        _allow(ruleset, path, rights)
    for port in settings["ports"] if confines_ports else ():
        _call("syscall", _ADD_RULE, ruleset, 2, struct.pack("QQ", 0b10, port), 0)
    return ruleset


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # a path that does not exist, or that nobody here may read
    if not os.path.isdir(path):
        rights &= _FILE_RIGHTS
    try:
        _call("syscall", _ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, descriptor), 0)
    finally:
        os.close(descriptor)


def _call(name: str, *arguments: object) -> int:
    converted = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in arguments]
    result = getattr(_LIBC, name)(*converted)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return int(result)


if __name__ == "__main__":
    main()
