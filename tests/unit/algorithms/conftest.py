from collections.abc import Iterator

import pytest

from megatron_rl.algorithms import cpu_loops, sequences


@pytest.fixture(autouse=True, scope="package")
def small_blocks() -> Iterator[None]:
    """Use blocks of few tokens, so that small batches are processed in several blocks, with compiled loops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequences, "BLOCK_TOKENS", 5)
        patch.setattr(cpu_loops, "FEWEST", 0)
        yield
