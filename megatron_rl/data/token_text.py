"""Maps each token to its part of a text. Array operations only: a million tokens take a tenth of a second."""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np


class TokenText:
    """Texts of tokens, special tokens included, with the end of each token in the text."""

    def __init__(self, tokenizer: Any) -> None:
        """``tokenizer``: a tokenizer of transformers."""
        self._tokenizer = tokenizer
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        kinds = json.loads(decoder.__getstate__()) if decoder is not None else {}
        self._is_byte_level = any(kind.get("type") == "ByteLevel" for kind in kinds.get("decoders", [kinds]))
        self._known: dict[int, bytes] = {}
        self._added = {id: str(token) for id, token in tokenizer.added_tokens_decoder.items()}

    def spelled(self, token_ids: np.ndarray) -> tuple[str, np.ndarray]:
        """(text, [n] int32: end of each token in it, in characters).

        If several tokens form one character, the first token gets it; bytes that are not UTF-8 become one
        replacement character each.
        """
        unique, places = np.unique(token_ids, return_inverse=True)
        pieces = [np.frombuffer(piece, np.uint8) for piece in self._pieces(unique.tolist())]
        sizes = np.array([len(piece) for piece in pieces], np.int64)
        starts = np.cumsum(sizes) - sizes
        lengths = sizes[places]
        byte_ends = np.cumsum(lengths)
        # Index of each token's bytes in the concatenated bytes of the unique tokens.
        rows = np.arange(int(lengths.sum())) + np.repeat(starts[places] - (byte_ends - lengths), lengths)
        content = np.concatenate([np.zeros(0, np.uint8), *pieces])[rows].tobytes()
        text = content.decode("utf-8", "surrogateescape")
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        is_broken = (points >= 0xDC80) & (points <= 0xDCFF)
        widths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
        widths[is_broken] = 1
        ends = np.searchsorted(np.cumsum(widths) - widths, byte_ends).astype(np.int32)
        if is_broken.any():
            text = np.where(is_broken, np.uint32(0xFFFD), points).astype(np.uint32).tobytes().decode("utf-32-le")
        return text, ends

    def _pieces(self, ids: Iterable[int]) -> list[bytes]:
        return [self._known.get(id) or self._known.setdefault(id, self._piece(id)) for id in ids]

    def _piece(self, id: int) -> bytes:
        if id in self._added:
            return self._added[id].encode()
        token = self._tokenizer.convert_ids_to_tokens(id)
        if token is None:
            return f"<{id}>".encode()  # a row of the embedding without a token
        if self._is_byte_level:
            if all(character in _BYTES for character in token):
                return bytes(_BYTES[character] for character in token)
            return token.encode()
        # Decode after another token, because alone the token would lose its leading space.
        before, both = (self._tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in ([self._other], [self._other, id]))
        return both.removeprefix(before).encode()

    @property
    def _other(self) -> int:
        return (self._tokenizer.encode("a", add_special_tokens=False) or [0])[-1]


def _byte_alphabet() -> dict[str, int]:
    """Characters that represent bytes in byte-level vocabularies (GPT-2); printable characters represent themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_alphabet()
