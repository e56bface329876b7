"""Supervised batches: every row once per epoch, and only responses are trained."""

from itertools import islice

import numpy as np
import torch

from megatron_rl.data.conversation_rows import TrainingSequence
from megatron_rl.supervised.fine_tuning import epoch_batches, sequence_batch
from megatron_rl.supervised.preference_optimization import tail_mask


def test_epoch_has_every_row_once_if_batches_divide_it():
    batches = list(islice(epoch_batches(12, 4, seed=1), 6))
    for epoch in (batches[:3], batches[3:]):
        assert sorted(row for batch in epoch for row in batch) == list(range(12))
    assert batches[:3] != batches[3:]


def test_batches_keep_their_size_if_they_do_not_divide_the_rows():
    assert {len(batch) for batch in islice(epoch_batches(10, 4, seed=1), 9)} == {4}


def test_too_few_rows_make_smaller_batches():
    assert [sorted(batch) for batch in islice(epoch_batches(3, 8, seed=1), 2)] == [[0, 1, 2]] * 2


def test_same_seed_gives_the_same_epoch_order():
    one, two = (list(islice(epoch_batches(50, 8, seed=5), 20)) for _ in range(2))
    assert one == two != list(islice(epoch_batches(50, 8, seed=6), 20))


def test_packed_mask_covers_the_trained_tokens_but_no_first_token_of_a_sequence():
    one, two = np.array([False] * 3 + [True] * 2), np.array([True] * 4)
    batch = sequence_batch([TrainingSequence([5, 6, 7, 8, 1], one), TrainingSequence([5, 9, 9, 1], two)])
    assert batch.tokens.tolist() == [5, 6, 7, 8, 1, 5, 9, 9, 1]
    assert batch.fields["mask"].tolist() == [False] * 3 + [True] * 2 + [False] + [True] * 3
    assert batch.cu_seqlens.tolist() == [0, 5, 9]


def test_tail_mask_equals_brute_force():
    lengths, tails = [5, 1, 4], [2, 0, 4]
    expected = [i >= n - t for n, t in zip(lengths, tails) for i in range(n)]
    assert tail_mask(torch.tensor(lengths), torch.tensor(tails)).tolist() == expected
