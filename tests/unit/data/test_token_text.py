"""Characters of each token, compared with the tokenizer's own decoding."""

import random

import numpy as np
import pytest

from megatron_rl.data.tokenizer import Tokenizer, TokenText
from tests.word_models import make_tiny_model, write_tokenizer

TEXT = "größer ∑ 中文字 and emoji 😀 so früh\n\tdef f(x): return x + 12"


@pytest.fixture(scope="module")
def byte_level():
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Inner(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|im_end|>"]))
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")


def test_text_and_ends_equal_the_tokenizers_own(byte_level):
    spelling, ids = TokenText(byte_level), byte_level.encode(TEXT + "<|im_end|>")
    text, ends = spelling.spelled(np.array(ids))
    assert text == TEXT + "<|im_end|>" and ends[-1] == len(text)
    for n in range(len(ids) + 1):
        whole = byte_level.decode(ids[:n], clean_up_tokenization_spaces=False)
        # A character whose bytes are not all there yet belongs to the token that begins it.
        assert text[: ends[n - 1] if n else 0].startswith(whole.rstrip("�")) and (n == 0 or ends[n - 1] - len(whole.rstrip("�")) <= 1)


def test_invalid_bytes_are_replaced_and_keep_their_positions(byte_level):
    spelling, rng = TokenText(byte_level), random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(len(byte_level)) for _ in range(rng.randrange(40))]
        text, ends = spelling.spelled(np.array(ids, np.int32))
        assert len(ends) == len(ids) and (np.diff(ends, prepend=0) >= 0).all() and (ends[-1] if ids else 0) == len(text)
        wanted = byte_level.decode(ids, clean_up_tokenization_spaces=False)
        assert text.replace("�", "") == wanted.replace("�", "") and ("�" in text) == ("�" in wanted)


def test_other_tokenizers_have_token_texts_too(tmp_path):
    make_tiny_model(tmp_path, vocab_size=256)
    write_tokenizer(tmp_path, "The answer")
    tokenizer = Tokenizer(tmp_path)
    ids = [*tokenizer.encode("The answer is 12.\n"), tokenizer.eos_id]
    text, ends = tokenizer.spelling.spelled(np.array(ids))
    assert text == "The answer is 12.\n<eos>"
    pieces = [text[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    assert [tokenizer.encode(piece)[0] for piece in pieces[:-1]] == ids[:-1]
    assert tokenizer.spelling.spelled(np.array([250]))[0] == "<250>"  # a row of the embedding without a token
