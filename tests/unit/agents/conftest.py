"""The tokenizer of the tests that answer requests; tests of templates make their own."""

import pytest

from megatron_rl.data.tokenizer import Tokenizer
from tests.chat_models import write_tokenizer


@pytest.fixture(scope="package")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer(folder)
