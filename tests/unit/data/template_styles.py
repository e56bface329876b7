"""Chat templates in the styles of public models, written for the tests, with tokenizers and conversations for them.

``{% generation %}`` marks the turns for TRL (``tests/trl_golden.py``); megatron_rl does not read it. This file needs only
``tokenizers`` and ``transformers``, so that TRL's environment can import it.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Style:
    template: str
    special: tuple[str, ...]
    """Special tokens; the last one ends a text."""
    bos: str | None = None
    system: bool = True
    """False: the template refuses a system message."""
    tools: bool = False
    thoughts: bool = False
    changes_turns: bool = False
    """The template changes earlier turns when others follow."""


_LOOP = "{% for m in messages %}"


def _chatml(before: str = "", turn: str = "{{ m.content }}", **options: Any) -> Style:
    template = (
        before
        + _LOOP
        + "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
        + turn
        + "<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return Style(template, ("<|im_start|>", "<|im_end|>"), **options)


def _headed(user: str, assistant: str, end: str, system: str = "", start: str = "", **options: Any) -> Style:
    """Turns that each start with a header."""
    template = (
        start
        + _LOOP
        + "{% if m.role == 'assistant' %}"
        + assistant
        + "{% generation %}{{ m.content }}"
        + end
        + "{% endgeneration %}{% elif m.role == 'system' %}"
        + (system or "{{ raise_exception('no system message') }}")
        + "{% else %}"
        + user
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}"
        + assistant
        + "{% endif %}"
    )
    return Style(template, system=bool(system), **options)


_QWEN_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}Tools:"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n"
    "{% elif messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n"
    "{% else %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
)
_TOOL_TURN = (
    "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
_CALLS = (
    "{% for call in m.tool_calls or [] %}{% if not loop.first or m.content %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
_QWEN25 = (
    _QWEN_TOOLS
    + _LOOP
    + "{% if m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}{{ m.content }}"
    + _CALLS
    + "<|im_end|>\n{% endgeneration %}"
    + _TOOL_TURN
    + "{% elif m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_THOUGHT = (
    "{% set ns = namespace(thought='', text=m.content) %}"
    "{% if m.reasoning_content %}{% set ns.thought = m.reasoning_content %}"
    "{% elif '</think>' in m.content %}{% set ns.thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set ns.text = m.content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)
_QWEN3 = (
    _QWEN_TOOLS
    + "{% set last = namespace(query=-1) %}"
    + "{% for m in messages %}{% if m.role == 'user' %}{% set last.query = loop.index0 %}{% endif %}{% endfor %}"
    + _LOOP
    + "{% if m.role == 'assistant' %}"
    + _THOUGHT
    + "<|im_start|>assistant\n{% generation %}"
    "{% if loop.index0 > last.query and (loop.last or ns.thought) %}<think>\n{{ ns.thought.strip('\n') }}\n</think>\n\n{% endif %}"
    "{{ ns.text }}"
    + _CALLS
    + "<|im_end|>\n{% endgeneration %}"
    + _TOOL_TURN
    + "{% elif m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
_MISTRAL_TOOLS = (
    "{{ bos_token }}{% set last = namespace(query=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.query = loop.index0 %}{% endif %}{% endfor %}"
    + _LOOP
    + "{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == last.query %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.role == 'assistant' %}{% generation %}{% if m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}"
    "{{ call.function | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}]</s>{% else %} {{ m.content }}</s>{% endif %}"
    "{% endgeneration %}{% else %}{{ raise_exception('roles') }}{% endif %}{% endfor %}"
)
_LLAMA31 = (
    "{{ bos_token }}"
    "{% if messages[0].role == 'system' %}<|start_header_id|>system<|end_header_id|>\n\n{{ messages[0].content }}<|eot_id|>{% endif %}"
    "{% set first = namespace(user=true) %}" + _LOOP + "{% if m.role == 'user' %}<|start_header_id|>user<|end_header_id|>\n\n"
    "{% if tools and first.user %}Functions:{% for tool in tools %}\n{{ tool | tojson(indent=4) }}{% endfor %}\n{% endif %}"
    "{% set first.user = false %}{{ m.content | trim }}<|eot_id|>"
    "{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
    "{% elif m.role == 'assistant' %}<|start_header_id|>assistant<|end_header_id|>\n\n{% generation %}"
    "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'
    '{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endgeneration %}'
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_R1 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    + _LOOP
    + "{% if m.role == 'user' %}<|User|>{{ m.content }}{% elif m.role == 'assistant' %}<|Assistant|>"
    "{% generation %}{{ m.content.split('</think>')[-1].lstrip() }}<|end_of_sentence|>{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
_HARMONY = (
    "<|start|>system<|message|>{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}Reason.{% endif %}<|end|>"
    "{% for m in messages %}{% set is_last = loop.last %}{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant{% generation %}"
    "{% if m.thinking and is_last %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "<|start|>assistant{% endif %}<|channel|>final<|message|>{{ m.content }}{% if is_last %}<|return|>{% else %}<|end|>{% endif %}"
    "{% endgeneration %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}"
    "{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
    "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + (system if loop.first else '') + m.content.strip() + ' [/INST]' }}"
    "{% else %}{% generation %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
_GEMMA3 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0].content + '\n\n' %}"
    "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}{% for m in rest %}"
    "{% if m.role == 'assistant' %}<start_of_turn>model\n{% generation %}{{ m.content | trim }}<end_of_turn>\n{% endgeneration %}"
    "{% else %}<start_of_turn>{{ m.role }}\n{{ (system if loop.first else '') + m.content | trim }}<end_of_turn>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>\n{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}"
)

STYLES: dict[str, Style] = {
    "chatml": _chatml(),
    "chatml_default_system": _chatml("{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"),
    "qwen25": Style(_QWEN25, ("<|im_start|>", "<|im_end|>"), tools=True),
    "qwen3": Style(_QWEN3, ("<|im_start|>", "<|im_end|>"), tools=True, thoughts=True, changes_turns=True),
    "qwen3_keeps_thoughts": _chatml(
        turn="{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}", thoughts=True
    ),
    "llama2": Style(_LLAMA2, ("<s>", "</s>"), bos="<s>"),
    "llama3": _headed(
        "<|start_header_id|>user<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
        "<|start_header_id|>system<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>",
        "{{ bos_token }}",
        special=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        bos="<|begin_of_text|>",
    ),
    "llama31": Style(
        _LLAMA31, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), bos="<|begin_of_text|>", tools=True
    ),
    "mistral": _headed("[INST] {{ m.content }} [/INST]", "", "</s>", start="{{ bos_token }}", special=("<s>", "</s>"), bos="<s>"),
    "mistral_tools": Style(
        _MISTRAL_TOOLS,
        (
            "<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
            "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>",
        ),
        bos="<s>",
        system=False,
        tools=True,
        changes_turns=True,
    ),
    "gemma": _headed(
        "<start_of_turn>user\n{{ m.content | trim }}<end_of_turn>\n",
        "<start_of_turn>model\n",
        "<end_of_turn>\n",
        start="{{ bos_token }}",
        special=("<bos>", "<start_of_turn>", "<end_of_turn>"),
        bos="<bos>",
    ),
    "gemma3": Style(_GEMMA3, ("<bos>", "<start_of_turn>", "<end_of_turn>"), bos="<bos>"),
    "phi3": Style(_PHI3, ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>")),
    "zephyr": _headed(
        "<|user|>\n{{ m.content }}</s>\n", "<|assistant|>\n", "</s>\n", "<|system|>\n{{ m.content }}</s>\n", special=("</s>",)
    ),
    "vicuna": _headed("USER: {{ m.content }} ", "ASSISTANT:", "</s>", "{{ m.content }} ", special=("</s>",)),
    "alpaca": _headed(
        "### Instruction:\n{{ m.content }}\n\n", "### Response:\n", "<|endoftext|>\n\n", "{{ m.content }}\n\n", special=("<|endoftext|>",)
    ),
    "deepseek": _headed(
        "User: {{ m.content }}\n\n",
        "Assistant:",
        "<|end_of_sentence|>",
        "{{ m.content }}\n\n",
        "{{ bos_token }}",
        special=("<|begin_of_sentence|>", "<|end_of_sentence|>"),
        bos="<|begin_of_sentence|>",
    ),
    "deepseek_r1": Style(
        _R1,
        ("<|begin_of_sentence|>", "<|User|>", "<|Assistant|>", "<think>", "</think>", "<|end_of_sentence|>"),
        bos="<|begin_of_sentence|>",
    ),
    "command_r": _headed(
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{{ m.content | trim }}<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{{ m.content | trim }}<|END_OF_TURN_TOKEN|>",
        "{{ bos_token }}",
        special=(
            "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>",
            "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|END_OF_TURN_TOKEN|>",
        ),
        bos="<BOS_TOKEN>",
    ),
    "granite": _headed(
        "<|start_of_role|>user<|end_of_role|>{{ m.content }}<|end_of_text|>\n",
        "<|start_of_role|>assistant<|end_of_role|>",
        "<|end_of_text|>\n",
        "<|start_of_role|>system<|end_of_role|>{{ m.content }}<|end_of_text|>\n",
        special=("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
    ),
    "exaone": _headed(
        "[|user|]{{ m.content }}\n", "[|assistant|]", "[|endofturn|]\n", "[|system|]{{ m.content }}[|endofturn|]\n",
        special=("[|user|]", "[|assistant|]", "[|system|]", "[|endofturn|]"),
    ),
    "harmony": Style(
        _HARMONY, ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"), thoughts=True, changes_turns=True
    ),
}

_USER = [{"role": "user", "content": text} for text in ("Hello, who are you?", "  And 12 + 13?\n", "Grüße 你好 <think>", "Bye")]
_SAID = ["I am a model.", "25\n\nDone. ", "你好! 😀", "Bye.\nSee you"]
_ADD = {
    "type": "function",
    "function": {"name": "add", "description": "a + b", "parameters": {"type": "object", "properties": {}}},
}
_CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 12, "b": 13}}}


def conversations(style: Style) -> list[dict[str, Any]]:
    """Rows {messages, tools} that the style can render."""
    turns = [message for user, text in zip(_USER, _SAID) for message in (user, {"role": "assistant", "content": text})]
    rows: list[dict[str, Any]] = [{"messages": turns[:2]}, {"messages": turns}]
    if style.system:
        rows.append({"messages": [{"role": "system", "content": "Be brief."}, *turns[2:6]]})
    if style.tools:
        with_call = [
            _USER[1], {"role": "assistant", "content": "", "tool_calls": [_CALL]}, {"role": "tool", "content": "25"},
            {"role": "assistant", "content": "It is 25."}, *turns[4:6],
        ]  # fmt: skip
        rows.append({"messages": with_call, "tools": [_ADD]})
    if style.thoughts:
        key = "thinking" if "m.thinking" in style.template else "reasoning_content"
        rows.append({"messages": [m | {key: "Let me see."} if m["role"] == "assistant" else m for m in turns]})
    return rows


def make_tokenizer(style: Style) -> Any:
    """A byte-level tokenizer with some merges, the style's special tokens and its template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = "assistant\n\nuser\n\nsystem\n\n" * 5 + "Hello, who are you? I am a model. It is 25.\n\nDone. Bye.\nSee you" * 3
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text[i : i + 9] for i in range(0, len(text), 9)], trainer)
    special = style.special
    tokenizer.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=style.bos,
        eos_token=special[-1],
        pad_token=special[-1],
        additional_special_tokens=list(special),
        chat_template=style.template,
        clean_up_tokenization_spaces=False,
    )
