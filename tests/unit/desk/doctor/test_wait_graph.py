"""Findings about which process waits for which, from snapshots of processes."""

from megatron_rl.desk.doctor.hang import RunSnapshot, ServerSnapshot, rank_lines, verdict
from megatron_rl.system.processes.process_probe import Frame, ProcessSnapshot

REDUCE = (
    Frame("/x/torch/distributed/distributed_c10d.py", 90, "all_reduce"),
    Frame("/x/torch/distributed/c10d_logger.py", 9, "wrapper"),
    Frame("/x/megatron/core/optimizer.py", 5, "step"),
)
GATHER = (Frame("/x/torch/distributed/distributed_c10d.py", 90, "all_gather"), Frame("/x/m.py", 1, "f"))
COMMAND = (
    Frame("/x/megatron_rl/parallel/collectives.py", 300, "_receive_bytes"),
    Frame("/x/megatron_rl/parallel/collectives.py", 60, "broadcast_object"),
    Frame("/x/megatron_rl/training/trainer_group.py", 112, "_serve_one"),
)
RUNNER = (Frame("/lib/python3.11/queue.py", 1, "get"), Frame("/x/megatron_rl/step/runner.py", 190, "_next_event"))
ELSEWHERE = (Frame("/x/site-packages/numpy/core.py", 7, "sort"), Frame("/home/me/loss.py", 12, "my_loss"))


def seen(frames=(), *, state="sleeping", pid=1, cpu=0.0, **notes):
    return ProcessSnapshot(pid, "node1", state=state, cpu_share=cpu, frames=frames, notes={k: tuple(v) for k, v in notes.items()})


def working(frames, since_s=60.0, **options):
    return seen(frames, work=("update of the engine policy", since_s), stage=("policy_update of step 4", since_s - 1), **options)


def texts(run):
    return [finding.text for finding in verdict(run)]


def test_equal_ranks_share_a_line_and_the_missing_rank_is_reported():
    ranks = {rank: working(REDUCE) for rank in (0, 1, 2, 5)} | {3: working(ELSEWHERE, pid=33, cpu=0.98), 4: working(REDUCE)}
    run = RunSnapshot(ranks, now_s=101.0)
    assert rank_lines(run) == [
        "ranks 0-2 and 4-5 wait in all_reduce, update of the engine policy of the stage policy_update of step 4 since 41 s",
        "rank 3 is in sort, called by my_loss (/home/me/loss.py:12), update of the engine policy of the stage policy_update of "
        "step 4, at 98% of a core since 41 s",
    ]
    (found,) = texts(run)
    assert found.startswith("ranks 0-2 and 4-5 wait for rank 3 (process 33 on node1), which is in sort, called by my_loss (/home/me")


def test_unnamed_collective_has_its_caller_and_a_recent_wait_is_no_hang():
    nameless = (
        Frame("/x/torch/distributed/distributed_c10d.py", 90, "_coalescing_manager"),
        Frame("/lib/python3.11/contextlib.py", 9, "__exit__"),
        Frame("/x/megatron/core/param_and_grad_buffer.py", 5, "start_grad_sync"),
    )
    run = RunSnapshot({0: working(nameless), 1: working(ELSEWHERE)}, now_s=101.0)
    assert rank_lines(run)[0].startswith("rank 0 waits in a collective of start_grad_sync, update of the engine policy")
    (found,) = verdict(run)
    assert found.text.startswith("rank 0 waits for rank 1") and found.hangs
    (calm,) = verdict(RunSnapshot(run.ranks, now_s=62.0))
    assert calm.text.startswith("nothing hangs: the work that others wait for has just started. rank 0") and not calm.hangs


def test_followers_without_a_command_wait_for_the_driver():
    run = RunSnapshot({0: working(ELSEWHERE), 1: seen(COMMAND, waits=("the driver's next command", 1.0))}, now_s=71.0)
    assert rank_lines(run)[1] == "rank 1 waits for the driver's next command since 70 s"
    assert texts(run)[0].startswith("rank 1 waits for rank 0 (process 1 on node1), which is in sort")


def test_ranks_in_different_collectives_are_reported_as_diverged():
    (found,) = texts(RunSnapshot({0: working(REDUCE), 1: working(GATHER)}))
    assert "all ranks are in a collective (all_gather, all_reduce): they are in different ones" in found
    (found,) = texts(RunSnapshot({0: working(REDUCE), 1: working(REDUCE)}))
    assert "a message was lost" in found


def test_gone_and_stopped_processes_are_reported_first():
    run = RunSnapshot({0: working(REDUCE), 1: seen(state="gone", pid=7), 2: working(ELSEWHERE, state="stopped", pid=8)})
    found = texts(run)
    assert len(found) == 2
    assert found[0].startswith("rank 1 is gone (process 7 on node1)") and found[1].endswith("kill -CONT 8")


def test_waiting_driver_blames_a_slow_reward_worker_or_busy_server():
    driver = seen(RUNNER, **{"score of step 3": ("rollout", 10.0)})
    grader = seen(ELSEWHERE, pid=5, scores=("a response of 9 characters", 20.0))
    follower = seen(COMMAND, waits=("the driver's next command", 1.0))
    run = RunSnapshot({0: driver, 1: follower}, graders=[grader], programs={5: [seen(pid=6)]}, now_s=61.0)
    assert "the driver runs the stage score of step 3 since 51 s" in rank_lines(run)
    (found,) = texts(run)
    assert "which waits for a reward worker:" in found and "scores a response of 9 characters since 41 s" in found and "process 6" in found
    quick = RunSnapshot({0: driver}, [ServerSnapshot("http://a", load="2 requests running, 0 waiting")], [grader], now_s=22.0)
    assert texts(quick) == [
        "the driver waits for score of step 3; its servers reply and are busy: http://a (2 requests running, 0 waiting)"
    ]
    dead = RunSnapshot({0: driver}, [ServerSnapshot("http://a", problem="no reply")])
    assert texts(dead)[0].startswith("server http://a hangs: no reply")


def test_verdict_reports_no_hang_and_silent_nodes():
    (calm,) = verdict(RunSnapshot({0: seen(RUNNER)}))
    assert calm.text.startswith("nothing hangs") and not calm.hangs
    assert "node2 did not reply" in texts(RunSnapshot({0: seen(RUNNER)}, silent_hosts=["node2"]))[0]
