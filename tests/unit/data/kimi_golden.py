"""Writes kimi_golden.json: a small vocabulary in tiktoken's format, and what tiktoken makes of texts with Kimi's split pattern.

python tests/unit/data/kimi_golden.py, in an environment with tiktoken and tokenizers, which the tests do not need.
"""

import base64
import json
import random
import sys
from pathlib import Path

import tiktoken
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).parents[3]))
from megatron_rl.data.tokenizer import NUM_SPECIAL, PATTERN

CORPUS = (
    "The quick brown fox doesn't jump over 12345 lazy dogs; they'll sleep.\n\n  def main(x):\n\treturn x['key'] + 1\n"
    "天地玄黄，宇宙洪荒。日月盈昃 Kimi 是一个语言模型。 Ça va très bien, naïve café ÉCOLE. Привет, мир! こんにちは世界 안녕하세요 🙂🚀 "
)
SPECIALS = ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"]


def random_text(draw: random.Random) -> str:
    pieces = [CORPUS[i : i + draw.randint(1, 12)] for i in (draw.randrange(len(CORPUS)) for _ in range(draw.randint(1, 8)))]
    return draw.choice(["", " ", "\n", "\r\n "]).join(pieces)


def main() -> None:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    trained.train_from_iterator([CORPUS], trainer)
    spelled = {char: byte for byte, char in _bytes_to_unicode().items()}
    tokens = [bytes(spelled[c] for c in text) for text, _ in sorted(trained.get_vocab().items(), key=lambda item: item[1])]
    ranks = {token: rank for rank, token in enumerate(dict.fromkeys(tokens))}
    names = {len(ranks) + i: SPECIALS[i] if i < len(SPECIALS) else f"<|reserved_token_{len(ranks) + i}|>" for i in range(NUM_SPECIAL)}
    encoding = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={text: id for id, text in names.items()})
    draw = random.Random(0)
    texts = [CORPUS, "", *(random_text(draw) for _ in range(120)), "[BOS]<|im_user|>user<|im_middle|>12 + 7<|im_end|>"]
    golden = {
        "ranks": [base64.b64encode(token).decode() for token in ranks],
        "texts": texts,
        "ids": [encoding.encode(text, allowed_special="all") for text in texts],
    }
    (Path(__file__).parent / "kimi_golden.json").write_text(json.dumps(golden) + "\n", encoding="utf-8")


def _bytes_to_unicode() -> dict[int, str]:
    """The characters by which byte-level tokenizers write bytes."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return {**{byte: chr(byte) for byte in kept}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


if __name__ == "__main__":
    main()
