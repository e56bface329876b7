from collections.abc import Iterator

import pytest

from megatron_rl.algorithms import sequences, token_sums


@pytest.fixture(autouse=True, scope="package")
def small_blocks() -> Iterator[None]:
    """Blocks of a few tokens, so that batches of a few sequences are gone through in several, with compiled loops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequences, "BLOCK_TOKENS", 5)
        patch.setattr(token_sums, "FEWEST", 0)
        yield
