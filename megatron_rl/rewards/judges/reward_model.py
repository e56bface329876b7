"""Reward ``reward_model``: the score of a scalar reward model (Bradley-Terry, arXiv 2203.02155) that SGLang serves.

The model reads the prompt, the response and the end-of-text token; the score is its head's value at the last token, without a
sigmoid unless asked, limited to [low, high]. `reward-train` with kind ``bradley_terry`` writes such models, and Hugging Face's
``...ForSequenceClassification`` with one label are others.

Laws: a score that is missing or not finite leaves the response unscored, and is never read as 0. Control tokens that a response
spells are removed first. Servers that disagree about one text are refused before the run starts.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megatron_rl.data.trajectory import Score
from megatron_rl.errors import DataError
from megatron_rl.rewards.judges.judge import (
    ask,
    check_tokenizer_path,
    check_trained,
    check_urls,
    escape_control_tokens,
    next_server,
    options_in,
    refuse_abort,
    server_urls,
    tokenizer_in,
)
from megatron_rl.rewards.registry import RewardError, register
from megatron_rl.rewards.workers.session import RewardCallError, get_json

_NAME = "reward_model"
_LARGEST = 500.0
"""Largest allowed limit: the exponential function of more overflows."""
_PROBE = "1 + 1 = ?", "2"
"""Prompt and response that every server scores before the run starts."""
_MAX_DISAGREEMENT = 0.05
"""Largest difference of two servers' scores of the probe, relative to its size if that is above 1: bfloat16 stays below."""


@dataclass(frozen=True)
class RewardModelOptions:
    """Address of a reward model, its tokenizer, and the limits of its scores."""

    url: str | list[str] = ""
    """URL of the model's SGLang server, or several URLs that are used in rotation; must be set."""
    tokenizer_path: str = ""
    """The model's folder, for its tokenizer; must be set."""
    chat: bool = False
    """Put the prompt into the tokenizer's chat template, as a user message."""
    system_prompt: str = ""
    """System message before the prompt; needs chat."""
    low: float = -10.0
    """Smallest score; lower ones count as this one."""
    high: float = 10.0
    """Largest score; higher ones count as this one."""
    sigmoid: bool = False
    """The reward is the score's sigmoid, in [0, 1] as verifiers and judges, with which it can then be mixed (``reward.by_type``)."""


def _limits(options: Mapping[str, Any]) -> tuple[float, float]:
    settings = options_in(options, RewardModelOptions)
    return (0.0, 1.0) if settings.sigmoid else (settings.low, settings.high)


def _check(options: Mapping[str, Any]) -> None:
    check_urls(_NAME, options.get("url"))
    settings = options_in(options, RewardModelOptions)
    check_tokenizer_path(_NAME, settings.tokenizer_path)
    if not -_LARGEST <= settings.low < settings.high <= _LARGEST:
        raise RewardError(f"reward {_NAME!r}: expected {-_LARGEST} <= low < high <= {_LARGEST}, got {settings.low} and {settings.high}")
    if settings.system_prompt and not settings.chat:
        raise RewardError(f"reward {_NAME!r}: option system_prompt needs chat: true")
    now = {"chat": ("use_chat_template", settings.chat), "system_prompt": ("system_prompt", settings.system_prompt)}
    check_trained(_NAME, settings.tokenizer_path, _NAME, now)
    try:
        _token_ids(*_PROBE, settings)
    except DataError as error:
        raise RewardError(f"reward {_NAME!r}: option chat: {error}") from error


async def _prepare(options: Mapping[str, Any]) -> None:
    """Check that all URLs serve a model with one score per text, the same. Raises RewardError, Transient or RewardCallError."""
    settings = options_in(options, RewardModelOptions)
    token_ids, scores = _token_ids(*_PROBE, settings), {}
    for url in server_urls(settings.url):
        info = await get_json(f"{url}/model_info")
        if not isinstance(info, dict) or info.get("is_generation") is not False:
            raise RewardError(
                f"{url} serves no reward model: /model_info answered {str(info)[:200]}; serve a folder whose config.json has an "
                "architecture that ends in ForSequenceClassification, as reward-train writes it for Llama, Qwen2 and Qwen3"
            )
        scores[url] = await _score(url, token_ids)
    low, high = min(scores.values()), max(scores.values())
    if high - low > _MAX_DISAGREEMENT * max(1.0, abs(low), abs(high)):
        raise RewardError(
            f"reward {_NAME!r}: the servers score one text differently: {scores}. They serve different models, or the files lack "
            "score.bias, for which SGLang then takes a random number: write zeros there"
        )


def _token_ids(prompt: str, response: str, settings: RewardModelOptions) -> list[int]:
    tokenizer = tokenizer_in(settings.tokenizer_path)
    prompt_ids = tokenizer.encode_prompt(prompt, chat=settings.chat, system_prompt=settings.system_prompt)
    return [*prompt_ids, *tokenizer.encode(escape_control_tokens(response, settings.tokenizer_path)), tokenizer.eos_id]


async def _score(url: str, token_ids: list[int]) -> float:
    (answer,) = await ask(f"{url}/classify", {"input_ids": [token_ids]}, 1)
    try:
        (value,) = answer["embedding"]
    except (KeyError, TypeError, ValueError) as error:
        with suppress(KeyError, TypeError):
            refuse_abort(answer["meta_info"]["finish_reason"])
        raise RewardCallError(f"{url}: expected one score of a model with one label, got {str(answer)[:200]}") from error
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RewardCallError(f"{url}: the score is {value}; do the weights contain NaN?")
    return float(value)


@register(_NAME, prepare=_prepare, check=_check, range=_limits, answer_required=False)
async def score(response: str, answer: str, *, prompt: str, options: RewardModelOptions = RewardModelOptions()) -> Score:
    """Score of prompt and response by the reward model, limited to [low, high]; with ``sigmoid`` between 0 and 1.

    Args:
        prompt: Text of the prompt; a row field.
    """
    value = await _score(next_server(server_urls(options.url)), _token_ids(prompt, response, options))
    limited = min(max(value, options.low), options.high)
    reward = 1 / (1 + math.exp(-limited)) if options.sigmoid else limited
    return Score(reward, f"score {value:.4f}", metrics={"limited": float(limited != value)})
