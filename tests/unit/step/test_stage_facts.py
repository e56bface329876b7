"""What a generate stage writes down of its work, against the trajectories themselves."""

import os
import subprocess
import sys

import numpy as np

from megatron_rl.data.trajectory import Prompt, Segment, Trajectory
from megatron_rl.step.stage_facts import MAX_ROWS, ChildCpuClock, generated_rows

STEP = 3


def response(id, *, prompt, held, new, ended):
    segments = [Segment((7,) * held, (-1.0,) * held, 0, "length", STEP - 1)] if held else []
    segments += [Segment((7,) * new, (-1.0,) * new, 0, "stop" if ended else "length", STEP)] if new else []
    return Trajectory(id, Prompt(str(id), (1,) * prompt), id, 0, 10_000, segments)


def numbers(words):
    return [int(word) for word in words.split()]


def test_every_row_is_written_down_in_its_order():
    rows = generated_rows(
        [
            response(0, prompt=3, held=5, new=4, ended=True),
            response(1, prompt=2, held=0, new=6, ended=False),
            response(2, prompt=9, held=8, new=0, ended=False),
        ],
        STEP,
        {0: 0.0124, 1: 1.5},
    )
    assert (rows["rows"], rows["tokens"]) == (3, 10)
    assert [numbers(rows[name]) for name in ("prompt", "held", "new", "ended", "ms")] == [
        [3, 2, 9],
        [5, 0, 8],
        [4, 6, 0],
        [1, 0, 0],
        [12, 1500, 0],
    ]


def test_of_very_many_rows_an_even_choice_with_the_longest_stands_for_all():
    lengths = np.random.default_rng(0).integers(1, 400, 3 * MAX_ROWS + 17)
    rows = generated_rows([response(i, prompt=1, held=0, new=int(n), ended=True) for i, n in enumerate(lengths)], STEP, {})
    kept = numbers(rows["new"])
    assert (rows["rows"], rows["tokens"]) == (len(lengths), lengths.sum())
    assert len(kept) == MAX_ROWS and max(kept) == lengths.max()
    assert abs(np.mean(kept) / lengths.mean() - 1) < 0.01


def test_the_time_of_children_counts_and_what_has_ended_is_not_forgotten():
    clock = ChildCpuClock()
    burn = "import time\nwhile time.process_time() < 0.4: pass\nprint(flush=True)\ninput()"
    before = clock.cpu_s()
    child = subprocess.Popen([sys.executable, "-S", "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ)
    child.stdout.readline()
    assert 0.35 < clock.cpu_s() - before < 2.0
    after = clock.cpu_s()
    child.communicate(b"\n")
    assert clock.cpu_s() >= after
