"""A vocabulary in tiktoken's format encodes as tiktoken does (kimi_golden.py made the reference), without code of the model's folder."""

import base64
import json
from pathlib import Path

import pytest

from megatron_rl.data.tokenizer import FILE, NUM_SPECIAL, Tokenizer
from megatron_rl.errors import DataError

GOLDEN = json.loads((Path(__file__).parent / "kimi_golden.json").read_text(encoding="utf-8"))
SPECIALS = ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_{{ m['role'] }}|>{{ m['role'] }}<|im_middle|>{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ranks = GOLDEN["ranks"]
    (tmp_path / FILE).write_text("".join(f"{token} {rank}\n" for rank, token in enumerate(ranks)))
    named = {str(len(ranks) + i): {"content": text, "special": i < 3} for i, text in enumerate(SPECIALS)}
    settings = {"added_tokens_decoder": named, "bos_token": "[BOS]", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    # Remote code, as the real folder names it, is never imported.
    settings |= {"tokenizer_class": "TikTokenTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenization_kimi.py").write_text("raise RuntimeError('remote code ran')")
    return tmp_path


def test_texts_become_tiktokens_tokens_and_return_unchanged(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    for text, ids in zip(GOLDEN["texts"], GOLDEN["ids"], strict=True):
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.raw_text(ids) == text


def test_special_tokens_follow_the_ranks_and_the_chat_template_is_read(folder: Path) -> None:
    tokenizer, first = Tokenizer(folder), len(GOLDEN["ranks"])
    assert tokenizer.eos_id == first + 2 and tokenizer.vocab_size == first + NUM_SPECIAL
    assert set(tokenizer.special_ids) == set(range(first, first + NUM_SPECIAL))
    ids = tokenizer.encode_prompt("12", chat=True)
    assert tokenizer.raw_text(ids) == "<|im_user|>user<|im_middle|>12<|im_end|><|im_assistant|>assistant<|im_middle|>"


@pytest.mark.parametrize(
    ("line", "names"),
    [("no base64! 3", ":257: expected a token in base64"), (f"{base64.b64encode(b'zz').decode()} 9999", "once each")],
)
def test_a_damaged_vocabulary_is_refused_with_its_line(folder: Path, line: str, names: str) -> None:
    lines = (folder / FILE).read_text().splitlines()
    (folder / FILE).write_text("\n".join([*lines[:256], line]))
    with pytest.raises(DataError, match=names):
        Tokenizer(folder)
