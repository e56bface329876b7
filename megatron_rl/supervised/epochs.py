"""Order of the training rows."""

from collections.abc import Iterator

import numpy as np


def epoch_batches(num_rows: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """Yield batches of row indices forever, each epoch in its own seeded order.

    A batch contains rows of one epoch only. With fewer rows than ``batch_size``, every batch is a whole epoch; otherwise
    an epoch's incomplete last batch is dropped.
    """
    generator = np.random.default_rng(seed)
    while True:
        order = generator.permutation(num_rows)
        # max(1, ...), so that fewer rows than ``batch_size`` still give a batch.
        for start in range(0, max(1, num_rows - batch_size + 1), batch_size):
            yield order[start : start + batch_size].tolist()
