"""The account of the driver's part of a step: tools/bench_driver.py, with its servers."""

import json
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import psutil
import pytest

from megatron_rl.errors import UserError

TOOLS = Path(__file__).parents[3] / "tools"
TINY = ["--slots", "64", "--share", "1/2", "--median", "60", "--cut", "300", "--window", "80", "--prompt-tokens", "8"]
TINY += ["--servers", "1", "--replicas", "2", "--ranks-per-replica", "2"]


@pytest.fixture(autouse=True)
def tools_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TOOLS)


def test_a_step_is_accounted_for_and_scaled_to_all_slots():
    from bench_driver import measure, parse, report

    found = measure(parse([*TINY, "--routes", "2x2x4", "--images", "1"]))
    assert (found["slots"], found["scale"]) == (32, 2.0)
    assert found["cpu_s"].keys() == {
        "requests", "parsing", "storing", "HTTP and event loop", "window batch", "to and from the ranks", "advantages",
        "policy batch", "critic batch", "metrics", "checkpoint", "rank 0's own sequences", "garbage collection",
    }  # fmt: skip
    assert found["total_cpu_s"] == pytest.approx(sum(found["cpu_s"].values())) and min(found["cpu_s"].values()) > 0
    # Tokens, log-probs, values, and the headers of short arrays.
    assert 12 <= found["bytes_per_token_held"] < 40
    assert found["gigabytes"]["to the ranks"] > 0 and found["gigabytes"]["from the ranks"] > 0
    # A file of some 180 kB for each of two prompts, scaled, to at most two replicas; of a group's 16 samples one brings it.
    assert 2 * 2 * 1e-4 < found["gigabytes"]["images that ranks take"] < 2 * 2 * 2 * 3e-4
    assert found["gigabytes"]["images through rank 0"] == 0
    assert found["longest_stall_s"] > 0 and "held per token" in report(found)


@pytest.mark.parametrize("spec", ["", "pareto:1.5:100", "lognormal:median=70,sigma=1.2", "file"])
def test_slots_are_in_their_steady_state(spec, tmp_path):
    from bench_driver import parse, steady_slots

    if spec == "file":
        spec = str(tmp_path / "lengths")
        Path(spec).write_text("50\n120 900\n")
    arguments = parse([*TINY, "--lengths", spec])
    total, done = steady_slots(arguments, 4000, np.random.default_rng(0))
    assert (done < total).all() and total.min() >= 16 and total.max() <= 300
    assert (done % 80 == 0).all() and 0.1 < (done > 0).mean() < 0.9


def test_small_windows_have_as_many_steps_as_the_longest_responses_need():
    from bench_driver import parse, steady_slots

    _, done = steady_slots(parse([*TINY, "--window", "2", "--lengths", "fixed:length=300"]), 16, np.random.default_rng(0))
    assert (done == 0).all()  # each has just ended for the third time
    _, done = steady_slots(parse([*TINY, "--window", "7"]), 4000, np.random.default_rng(0))
    assert done.max() > 200


@pytest.mark.parametrize("spec", ["pareto:1.5", "/nowhere/lengths", "uniform:middle=3"])
def test_lengths_that_cannot_be_read_are_said_without_a_traceback(spec, monkeypatch):
    from bench_driver import main

    monkeypatch.setattr(sys, "argv", ["bench_driver.py", *TINY, "--lengths", spec])
    monkeypatch.setattr("megatron_rl.system.processes.host_memory.disable_memory_trim", lambda: None)
    for name in ("MASTER_ADDR", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(SystemExit) as stopped:
        main()
    # Python prints a text and exits with 1.
    assert isinstance(stopped.value.code, str) and stopped.value.code.startswith(f"bench_driver: error: --lengths {spec}")


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("--share 0", "--share 0: expected a part"), ("--share=-1", "--share -1"), ("--share 9/8", "at most 1"),
        ("--share 1/0", "--share 1/0"), ("--share half", "as 1/32 or 0.125"), ("--slots 0", "--slots 0: expected at least 1"),
        ("--routes 48x8", "as 48x8x128"), ("--routes 2x5x4", "--routes 2x5x4"), ("--servers 0", "--servers 0"),
        ("--workers=-1", "--workers -1"), ("--nodes 2 --workers 0", "--workers 0"), ("--ranks-per-node 0", "--ranks-per-node 0"),
        ("--cut 15", "--cut 15: expected at least 16"), ("--median nan", "--median nan"), ("--sigma=-1", "--sigma -1"),
        ("--json /nowhere/found.json", "folder does not exist"),
    ],
)  # fmt: skip
def test_bench_driver_rejects_impossible_sizes_by_name(words, names):
    from bench_driver import check, parse

    with pytest.raises(UserError, match=re.escape(names)):
        check(parse(words.split()))
    check(parse([]))
    check(parse("--share .5 --routes 1x1x1 --workers 0 --sigma 0".split()))


@pytest.mark.parametrize(
    ("free_gib", "names"), [(20, "--share 1/3 fits"), (3, "--share 1/19 fits"), (0.5, "not even 16 slots fit"), (64, "")]
)
def test_a_run_that_does_not_fit_is_refused_with_the_share_that_does(monkeypatch, free_gib, names):
    from bench_driver import check_memory, parse

    def tokens_of(share: str) -> int:
        return int(82e6 * float(Fraction(share)))

    monkeypatch.setattr("megatron_rl.system.processes.host_memory.available_bytes", lambda: int(free_gib * 2**30))
    words = ["--routes", "48x8x128"]
    if not names:
        return check_memory(parse(["--share", "1", *words]), tokens_of("1"))
    with pytest.raises(UserError, match=names):
        check_memory(parse(["--share", "1", *words]), tokens_of("1"))
    if share := re.search(r"1/\d+", names):
        check_memory(parse(["--share", share[0], *words]), tokens_of(share[0]))
    return None


@pytest.mark.parametrize("words", [["--replicas", "1", "--ranks-per-replica", "1"], ["--ranks-per-node", "1"]])
def test_rank_0_passes_no_token_on_alone_or_in_a_replica_that_spans_machines(words, monkeypatch):
    from bench_driver import measure, parse

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # where arrays are served
    found = measure(parse([*TINY, *words]))
    assert found["gigabytes"]["tokens and routes through rank 0"] == 0


def test_a_stub_server_gives_what_is_left_of_a_response_and_of_the_window():
    import orjson
    from stub_servers import Answers

    answers = Answers(np.array([50, 200]), prompt_tokens=8, routes=(2, 2, 4), version="3")
    for given, limit, expected, reason in ((8, 80, 80, "length"), (8 + 150, 80, 50, "stop")):
        sample = orjson.loads(b"".join(answers.sample("train-12-1-1;", given, limit)))
        meta = sample["meta_info"]
        assert len(sample["output_ids"]) == expected == meta["completion_tokens"] and meta["finish_reason"]["type"] == reason
        assert [entry[1] for entry in meta["output_token_logprobs"]] == sample["output_ids"]
        assert len(meta["routed_experts"]) == -(-(given + expected - 1) * 16 // 3) * 4


def test_stub_servers_end_with_the_process_that_started_them_however_it_ends(tmp_path):
    np.save(tmp_path / "lengths.npy", np.array([5]))
    command = [sys.executable, str(TOOLS / "stub_servers.py"), str(tmp_path / "lengths.npy"), "--servers", "2"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert len(json.loads(process.stdout.readline())) == 2
        servers = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert len(servers) == 2 and not psutil.wait_procs(servers, timeout=30)[1]
