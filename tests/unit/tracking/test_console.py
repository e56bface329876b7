"""The display is short, and never raises into training."""

import io
import math

import pytest

from megatron_rl.tracking.console import TrainingConsole, compact, duration, plain_line, sparkline


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [(duration, 42, "42 s"), (duration, 200, "3 min 20 s"), (duration, 18_720, "5 h 12 min"),
     (compact, 12.5, "12.5"), (compact, 1_234_567, "1.23M"), (compact, 12_345, "12.3k"), (compact, 0.00012, "1.2e-04")],
)  # fmt: skip
def test_durations_and_values_format_as_short_text(function, value, text):
    assert function(value) == text


def test_sparkline_scales_from_lowest_to_highest():
    assert sparkline([0, 1, 2]) == "▁▅█" and sparkline([math.nan]) == "" and len(sparkline(list(range(99)), 40)) == 40


def test_step_is_one_plain_line_without_a_terminal():
    out = io.StringIO()
    with TrainingConsole(2, stream=out, plain_interval_s=0.0) as console:
        console.update(1, {"reward/mean": 0.25, "step/time_s": 1.0})
        console.warning("grader slow")
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("step 1/2  reward 0.250") and lines[1] == "warning: grader slow"
    assert "\x1b" not in out.getvalue()
    assert plain_line(1, 2, {}, None) == "step 1/2"


def test_remaining_time_respects_the_time_limit_of_the_run():
    out = io.StringIO()
    with TrainingConsole(1_000_000, left_s=lambda: 30.0, stream=out, plain_interval_s=0.0) as console:
        console.update(1, {"step/time_s": 2.0})
    assert "31 s to go" in out.getvalue()


def test_evaluation_text_has_standard_error_and_sets():
    numbers = {
        "eval/accuracy": 0.5, "eval/accuracy_stderr": 0.021, "eval/aime/accuracy": 0.25, "eval/math.500/accuracy": 0.75,
        "eval/math.500/accuracy_stderr": 0.03, "eval/reward/accuracy": 0.1, "eval/aime/reward/accuracy": 0.1,
    }  # fmt: skip
    assert "eval 50.0% ± 2.1% (aime 25.0%, math.500 75.0% ± 3.0%)" in plain_line(1, 2, numbers, None)


def test_closed_pipe_does_not_end_a_run():
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    with TrainingConsole(2, stream=Closed(), plain_interval_s=0.0) as console:
        console.update(1, {"reward/mean": 0.25})
        console.note("still here")


def test_control_characters_of_notes_and_warnings_are_shown_as_symbols():
    out = io.StringIO()
    with TrainingConsole(2, stream=out, plain_interval_s=0.0) as console:
        console.note("reward:\x1b]0;title\x07 \x9b31m\u202e")
        console.warning("\x1b[31mred\nsecond line")
    text = out.getvalue()
    assert not set(text) & set("\x1b\x07\x9b\u202e")
    assert "␛]0;title␇" in text and "second line" in text
