"""A tiny model folder that chats: one token per character, ChatML turns, and tool calls as JSON between tags."""

import json
import string
from pathlib import Path
from typing import Any

from tests.tiny_models import make_tiny_model

PAD, EOS, UNK, START, END = "<pad>", "<|endoftext|>", "<unk>", "<|im_start|>", "<|im_end|>"
SPECIAL = [PAD, EOS, UNK, START, END]
END_ID = SPECIAL.index(END)
VOCAB_SIZE = len(SPECIAL) + len(string.printable)

TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{% if m.role == 'tool' %}result: {% endif %}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_tokenizer(folder: str | Path) -> None:
    """Write a tokenizer of single characters with the chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *string.printable])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    Path(folder).mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(Path(folder) / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": END,
        "unk_token": UNK,
        "additional_special_tokens": [EOS, START],
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings))


def make_chat_model(folder: str | Path, family: str = "qwen2", **config_overrides: Any) -> Path:
    """A tiny model with this tokenizer; the rest as for ``tiny_models.make_tiny_model``."""
    path = make_tiny_model(folder, family, vocab_size=112, eos_token_id=END_ID, max_position_embeddings=8192, **config_overrides)
    write_tokenizer(path)
    return path


def called(name: str, **arguments: Any) -> str:
    """A tool call as the model writes it."""
    return f'<tool_call>\n{json.dumps({"name": name, "arguments": arguments})}\n</tool_call>'
