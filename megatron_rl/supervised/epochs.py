"""The order in which rows are trained on."""

from collections.abc import Iterator

import numpy as np


def epoch_batches(num_rows: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """Endless row indices: each epoch in its own seeded order, batches never mix epochs unless rows are too few."""
    generator = np.random.default_rng(seed)
    while True:
        order = generator.permutation(num_rows)
        for start in range(0, max(1, num_rows - batch_size + 1), batch_size):
            yield order[start : start + batch_size].tolist()
