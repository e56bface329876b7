"""The only place where text becomes tokens: a thin wrapper of the model folder's Hugging Face tokenizer.

A vocabulary in tiktoken's format (``tiktoken.model``), as Kimi-K2 has it, is read without running the folder's own code:
texts become the tokens that tiktoken makes of them with Kimi's split pattern. Special tokens take the 256 ids after the
ranks; tokenizer_config.json names some of them, the others are reserved.

Each token's part of a text is found by array operations only: a million tokens take a tenth of a second.
"""

import functools
import json
import re
from base64 import b64decode
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_rl.data.vision import ImageProcessor
from megatron_rl.errors import DataError
from megatron_rl.families.model_facts import has_vision, read_model_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Message = dict[str, Any]
"""One turn of a chat: role, content and any other fields that the chat template reads."""
FILE = "tiktoken.model"
NUM_SPECIAL = 256
_LETTERS = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_LETTERS}]*[\p{{Ll}}{_LETTERS}]+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_LETTERS}]+[\p{{Ll}}{_LETTERS}]*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Pieces that are encoded one by one: words by script and case, up to three digits, punctuation, blanks."""


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


class Tokenizer:
    """Text to ids and back. Raises DataError if the folder has no tokenizer or the tokenizer does not fit the model."""

    def __init__(self, path: str | Path) -> None:
        from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops

        declare_torchvision_ops()
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        self.path = Path(path)
        if not (self.path / "tokenizer_config.json").is_file():
            raise DataError(f"{self.path}: no tokenizer_config.json; a model folder needs its tokenizer's files")
        # Load tokenizer.json unchanged: AutoTokenizer may rebuild it for the model type (for Qwen2 it drops text that the
        # vocabulary lacks instead of using the unknown token).
        loader = PreTrainedTokenizerFast if (self.path / "tokenizer.json").is_file() else AutoTokenizer
        has_ranks = loader is AutoTokenizer and (self.path / FILE).is_file()
        try:
            self._tokenizer = read_tiktoken(self.path) if has_ranks else loader.from_pretrained(str(self.path))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self.path}: the tokenizer cannot be loaded: {str(error).splitlines()[0]}") from error
        if self._tokenizer.eos_token_id is None:
            raise DataError(
                f"{self.path}: the tokenizer has no end-of-text token; set eos_token in tokenizer_config.json"
            )
        self.eos_id: int = self._tokenizer.eos_token_id
        self._check_vocabulary()

    def _check_vocabulary(self) -> None:
        config_file = self.path / "config.json"
        if not config_file.is_file():
            return
        vocab_size = read_model_json(self.path).get("vocab_size")
        largest = max(self._tokenizer.get_vocab().values())
        if vocab_size is not None and largest >= vocab_size:
            raise DataError(
                f"{self.path}: vocabulary mismatch: the tokenizer's largest id is {largest}, but config.json says "
                f"vocab_size={vocab_size}; use the tokenizer that belongs to this checkpoint"
            )

    @functools.cached_property
    def vision(self) -> ImageProcessor | None:
        """Image processor of the model; None for a model without vision. Raises DataError if the processor is missing."""
        config_file = self.path / "config.json"
        if not config_file.is_file() or not has_vision(read_model_json(self.path)):
            return None
        return ImageProcessor(self.path)

    @property
    def image_text(self) -> str:
        """Text form of an image: its marks and one image token. Only for models with vision."""
        if self.vision is None:
            raise DataError(f"{self.path}: a model without vision has no spelling for an image")
        ids = (self.vision.start_token_id, self.vision.image_token_id, self.vision.end_token_id)
        return "".join(self._tokenizer.convert_ids_to_tokens(list(ids)))

    @property
    def vocab_size(self) -> int:
        return max(self._tokenizer.get_vocab().values()) + 1

    @functools.cached_property
    def special_texts(self) -> tuple[str, ...]:
        """Texts that become control tokens anywhere in a text."""
        added = self._tokenizer.added_tokens_decoder.values()
        return tuple(dict.fromkeys([*self._tokenizer.all_special_tokens, *(t.content for t in added if t.special)]))

    @functools.cached_property
    def spelling(self) -> TokenText:
        """Token texts, including special tokens."""
        return TokenText(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a control token's text as ordinary letters: the text is cut where both pieces are free of control tokens."""
        control = self._tokenizer.added_tokens_decoder.keys() - {self._tokenizer.unk_token_id}
        for cut in range(1, len(text)):
            ids = self.encode(text[:cut]) + self.encode(text[cut:])
            if control.isdisjoint(ids):
                return ids
        return []

    def encode_with_offsets(self, text: str) -> tuple[list[int], np.ndarray, np.ndarray]:
        """(ids, [n] first character of each token, [n] its end). Raises DataError for a tokenizer without tokenizer.json."""
        if not self._tokenizer.is_fast:
            raise DataError(
                f"{self.path}: training on conversations needs the place of each token in its text, which a Python tokenizer does not "
                "give; use a model folder with tokenizer.json"
            )
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = np.array(found["offset_mapping"], np.int64).reshape(-1, 2)
        return found["input_ids"], offsets[:, 0], offsets[:, 1]

    def template_reads(self, argument: str) -> bool:
        """True if the chat template mentions ``argument``; other arguments have no effect."""
        return bool(re.search(rf"\b{re.escape(argument)}\b", self.template_text)) or argument == "chat_template"

    @property
    def template_text(self) -> str:
        """The chat template; "None" without one."""
        return str(self._tokenizer.chat_template)

    @property
    def added_texts(self) -> tuple[str, ...]:
        """Texts that become one token anywhere in a text, control tokens and others."""
        return tuple(dict.fromkeys([*self.special_texts, *(t.content for t in self._tokenizer.added_tokens_decoder.values())]))

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        *,
        generate: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Text of a conversation in the chat template; with ``generate`` up to the start of the model's answer.

        ``tools`` and the arguments of tool calls are objects; ``arguments`` may have the tools instead. Raises DataError if
        there is no template, or if it rejects these messages.
        """
        if self._tokenizer.chat_template is None:
            raise DataError(
                f"{self.path}: the tokenizer has no chat template, which data.use_chat_template and prompts that are "
                "messages need; give prompts as text with data.use_chat_template=false, or a chat model's tokenizer"
            )
        from jinja2 import TemplateError

        options = {"tools": list(tools) or None, **(arguments or {})}
        try:
            return self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=generate, tokenize=False, **options)
        except (TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
            roles = ", ".join(message["role"] for message in messages[-8:])
            given = f" with {', '.join(arguments)}" if arguments else ""
            raise DataError(f"{self.path}: the chat template rejects messages of {roles}{given}: {error}") from error

    def encode_prompt(
        self,
        prompt: str | Sequence[Message],
        *,
        chat: bool,
        system_prompt: str = "",
        arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a prompt. With ``chat`` the prompt becomes messages in the chat template, up to the start of the
        model's answer.

        ``system_prompt`` is put before messages without a system message. ``arguments``: additional template
        arguments, such as ``enable_thinking`` and ``tools``. Raises DataError if the tokenizer has no chat
        template, or one that rejects these messages.
        """
        if not chat:
            return self._tokenizer.encode(prompt)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system_prompt}, *messages]
        return self.encode(self.render_chat(messages, generate=True, arguments=arguments))

    def encode_message(
        self, text: str, *, chat: bool, last_token_id: int | None = None, arguments: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Ids of a message that follows a turn of the model in the same history.

        Without ``chat``, the ids of the unchanged text. With ``chat``, everything that the chat template puts
        between the model's last token and the start of its next answer, with ``text`` as the user's message.
        ``last_token_id`` is the last token of the history: the template's closing token is omitted if the model has
        already generated it, and kept if the turn was truncated. ``arguments``: template arguments of the prompt.
        """
        if not chat:
            return self.encode(text)
        from jinja2 import TemplateError

        # Render a whole conversation: the text after the model's reply is the glue between turns.
        reply = "[reply]"
        messages = [("user", "question"), ("assistant", reply), ("user", text)]
        try:
            rendered = self._tokenizer.apply_chat_template(
                [{"role": role, "content": content} for role, content in messages],
                add_generation_prompt=True,
                tokenize=False,
                **arguments or {},
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise DataError(
                f"{self.path}: no message can follow a turn of the model: the tokenizer has no chat template, or it "
                f"rejects a second user message ({error})"
            ) from error
        _before, found, glue = rendered.partition(reply)
        if not found or text.strip() not in glue:
            raise DataError(
                f"{self.path}: the chat template does not keep the model's turn and the message after it unchanged; "
                "dialogues need a template that does"
            )
        ids = self.encode(glue)
        return ids[1:] if ids and ids[0] == last_token_id else ids

    @property
    def special_ids(self) -> list[int]:
        """Ids of the special tokens: end of text, padding, chat marks."""
        added = self._tokenizer.added_tokens_decoder.items()
        return sorted({*self._tokenizer.all_special_ids, *(id for id, token in added if token.special)})

    @functools.cached_property
    def as_json(self) -> str:
        """JSON of the tokenizer for the ``tokenizers`` library, for ``decode`` in another process; empty for a
        Python tokenizer."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return backend.to_str() if backend is not None else ""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def raw_text(self, token_ids: Sequence[int]) -> str:
        """Text with special tokens, for messages."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def unknown_text(self, text: str, token_ids: Sequence[int] | None = None) -> str:
        """Part of ``text`` that is only covered by the unknown token; empty if the tokenizer covers all of it.

        ``token_ids``: ids of the text, or of a text that contains it, if the caller has them; without the unknown token
        among them ``text`` is not encoded again.
        """
        unknown_id = self._tokenizer.unk_token_id
        is_known = token_ids is not None and unknown_id not in token_ids
        if unknown_id is None or is_known or unknown_id not in self.encode(text):
            return ""
        return "".join(sorted({c for c in text if unknown_id in self.encode(c)})) or text


def read_tiktoken(folder: Path) -> "PreTrainedTokenizerFast":
    """Return the tokenizer of a folder with ``tiktoken.model``. Raises DataError if the file is no vocabulary."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    ranks, spelled = _ranks(folder / FILE), bytes_to_unicode()

    def text_of(token: bytes) -> str:
        return "".join(spelled[byte] for byte in token)

    merges = [(text_of(left), text_of(right)) for left, right in _merges(ranks)]
    tokenizer = Tokenizer(models.BPE({text_of(token): rank for token, rank in ranks.items()}, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    named = {int(id): token["content"] for id, token in settings.get("added_tokens_decoder", {}).items()}
    # tiktoken treats all 256 as special, whatever the file says of them.
    specials = [named.get(id, f"<|reserved_token_{id}|>") for id in range(len(ranks), len(ranks) + NUM_SPECIAL)]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    kept = {name: settings[name] for name in ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template") if settings.get(name)}
    template = folder / "chat_template.jinja"
    if template.is_file():
        kept["chat_template"] = template.read_text(encoding="utf-8")
    texts = {name: value["content"] if isinstance(value, dict) else value for name, value in kept.items()}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **texts)


def _ranks(file: Path) -> dict[bytes, int]:
    """Map each token to its rank, which is its id."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise DataError(f"{file}:{number}: expected a token in base64 and its rank, got {line[:60]!r}") from error
    has_all_bytes = all(bytes([byte]) in ranks for byte in range(256))
    if sorted(ranks.values()) != list(range(len(ranks))) or not has_all_bytes:
        expected = f"the ranks 0 to {len(ranks) - 1} once each, and a token for every byte"
        raise DataError(f"{file}: expected {expected}; the file may be truncated")
    return ranks


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """All pairs of tokens that form a token, in the order in which tiktoken merges them: by the rank of the result."""
    merges = []
    for token, rank in ranks.items():
        parts = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        merges += [(rank, ranks[left], ranks[right], left, right) for left, right in parts]
    return [(left, right) for *_, left, right in sorted(merges)]
