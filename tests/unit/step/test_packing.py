"""Laws of windows in packed batches: reads and writes under a mask equal those of a list of indices."""

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_rl.step.packing import Stretches, on_mask, within

RUNS = st.lists(st.tuples(st.booleans(), st.integers(1, 90)), max_size=12)


@given(RUNS, st.integers(0, 9), st.lists(st.integers(0, 2000), max_size=4))
@example([(True, 1), (False, 1)] * 40, 0, [3])  # words that are equal, with edges inside
@example([(True, 64), (False, 3), (True, 61)], 0, [64, 67])
@example([], 0, [])
def test_tokens_of_a_mask_are_read_and_put_in_their_order(runs, offset, cuts):
    mask = torch.tensor([flag for flag, length in runs for _ in range(length)], dtype=torch.bool)[offset:]
    values = torch.arange(1.0, len(mask) + 1)
    stretches = Stretches(mask)
    assert torch.equal(stretches.within(values), values[mask])
    assert torch.equal(stretches.on_mask(values[mask]), torch.where(mask, values, 0.0))
    assert torch.equal(on_mask(within(mask, mask), mask), mask)
    starts = sorted([0, *(min(cut, len(mask)) for cut in cuts), len(mask)])
    assert stretches.borders(torch.tensor(starts)).tolist() == [int(mask[:start].sum()) for start in starts]
