"""Results of a reward are numbers and Scores; text that looks like a number is refused."""

from fractions import Fraction

import numpy as np
import pytest

from megatron_rl.data.trajectory import Score
from megatron_rl.rewards.workers.worker import as_result


@pytest.mark.parametrize("outcome", [1, 1.0, True, np.float32(1), np.int64(1), np.array(1.0), Fraction(1), Score(1.0)])
def test_any_numeric_result_is_a_value(outcome) -> None:
    assert as_result(outcome)[0] == 1.0


@pytest.mark.parametrize("outcome", ["1.0", b"1", bytearray(b"1"), "nan", "", Score("1.0"), None, [1.0], {"value": 1.0}])
def test_text_and_containers_are_not_values(outcome) -> None:
    with pytest.raises(TypeError):
        as_result(outcome)
