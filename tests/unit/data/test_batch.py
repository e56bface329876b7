"""The ranks' results are restored in the batch's order, on the tokens of the batch's spans."""

import pytest
import torch

from megatron_rl.data.batch import PackedBatch, cu_seqlens_of, restore, select_spans

LENGTHS = [4, 6, 3, 5]
PLAN = [[[2, 0], []], [[3], [1]]]


@pytest.mark.parametrize("spans", [None, [(1, 3), (0, 6), (0, 0), (4, 5)]])
@pytest.mark.parametrize("per_sequence", [True, False])
def test_values_of_spans_are_restored_to_their_tokens(spans: list[tuple[int, int]] | None, per_sequence: bool) -> None:
    values, ends = torch.arange(1.0, 19.0), torch.tensor([10.0, 20.0, 30.0, 40.0])
    batch = PackedBatch(
        torch.zeros(18, dtype=torch.int64),
        cu_seqlens_of(torch.tensor(LENGTHS)),
        {"values": values},
        spans=None if spans is None else torch.tensor(spans),
    )
    answers = []
    for replica in PLAN:
        parts = []
        for indices in replica:
            microbatch = batch.select(indices)
            parts.append(select_spans(microbatch, microbatch.fields["values"]))
            parts += [ends[indices]] if per_sequence else []
        answers.append(torch.cat(parts))
    found = restore(batch, PLAN, answers, per_sequence=per_sequence)
    expected = torch.zeros(18) if spans else values
    for (first, end), start in zip(spans or (), batch.cu_seqlens.tolist()):
        expected[start + first : start + end] = values[start + first : start + end]
    assert torch.equal(found[0], expected)
    assert len(found) == 1 + per_sequence and torch.equal(found[-1], ends if per_sequence else expected)
    assert sum(map(len, answers)) == int((expected != 0).sum()) + per_sequence * 4
