"""Client of a judge: the probability of its judgment token, from a model served by SGLang.

A judge reads a text and its next token states whether it agrees. The score is not the sampled token but

    p = sum of P(yes forms) / (sum of P(yes forms) + sum of P(no forms))

at that position: the softmax over the two judgments' logits, each summed over its surface forms ("YES", " Yes"). The
server's log-probs are float32 at temperature 1; the sums here are float64.

Invariants: p is in [0, 1]. A log-prob that is missing or not finite is an error, never a p. Equal texts of one call are
sent once, so they get equal probabilities.
"""

import asyncio
import itertools
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from megatron_rl.rewards.judges.reward_server import check_url
from megatron_rl.rewards.judges.templates import NO_WORD, YES_WORD, check_template, word_token
from megatron_rl.rewards.registry import RewardError
from megatron_rl.rewards.rules.format import CLOSE, OPEN, split_thought
from megatron_rl.rewards.workers.session import RewardCallError, Transient, get_json, post_json

_TRAINING_RECORD = "reward_training.json"
"""File next to the weights of a judge that `reward-train` wrote: its template and words."""
FORMAT_FAILURE = "the thought has no proper form; not judged"

_DOWN_S = 5.0
"""Seconds during which a server that did not answer is skipped, if there is another one."""

_turns = itertools.count()
_down_until: dict[str, float] = {}
"""Maps URL to the monotonic time in seconds until which it is skipped."""
_Kind = TypeVar("_Kind")
_Words = tuple[tuple[str, ...], tuple[str, ...]]
"""(surface forms of yes, surface forms of no)."""
_Ids = tuple[tuple[int, ...], tuple[int, ...]]
"""(token ids of yes, token ids of no)."""
_token_ids_of_words: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, str], int]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Judgment:
    probability: float
    """Probability of yes, among yes and no."""
    mass: float
    """Probability of yes and no together; near 0, the judge does not answer the question at all."""


@dataclass(frozen=True)
class JudgeOptions:
    """Address of a judge, its words, and the part of a response that it reads."""

    url: str | list[str] = ""
    """URL of the judge's SGLang server, or several URLs that are used in rotation; must be set."""
    tokenizer_path: str = ""
    """Folder of the judge's tokenizer, for token-exact texts; if empty, the server's own tokenizer is used."""
    yes_words: list[str] | None = None
    """Surface forms of "yes", each a single token."""
    no_words: list[str] | None = None
    """Surface forms of "no", each a single token."""
    chat: bool = False
    """Send the text as a user message in the tokenizer's chat template."""
    require_think: bool = False
    """Score a response without a thought 0."""
    opened_by_prompt: bool = False
    """The prompt already ends with ``<think>``."""

    @property
    def words(self) -> _Words:
        return tuple(self.yes_words or (YES_WORD,)), tuple(self.no_words or (NO_WORD,))


DEFAULT_OPTIONS = JudgeOptions()


def check_urls(name: str, url: Any) -> None:
    """Raise RewardError for a value that is neither a server's address nor a list of such addresses."""
    for one in url if isinstance(url, list) and url else [url]:
        check_url(name, one)


def check_judge(name: str, options: Mapping[str, Any], template: str, template_fields: Sequence[str]) -> None:
    """Raise UserError for invalid options of a judge; contacts no server."""
    check_urls(name, options.get("url"))
    for key in ("yes_words", "no_words"):
        words = options.get(key)
        if words is not None and not (
            isinstance(words, list) and words and all(isinstance(w, str) and w for w in words)
        ):
            raise RewardError(f"reward {name!r}: option {key} must be a list of words, got {words!r}")
    settings = options_in(options, JudgeOptions)
    yes_words, no_words = settings.words
    both = set(yes_words) & set(no_words)
    if both:
        raise RewardError(f"reward {name!r}: {sorted(both)} are in both yes_words and no_words")
    check_template(template, template_fields)
    if settings.chat and not settings.tokenizer_path:
        raise RewardError(f"reward {name!r}: option chat needs tokenizer_path, whose chat template is used")
    if settings.tokenizer_path:
        check_tokenizer_path(name, settings.tokenizer_path, "; or omit the option to use the server's tokenizer")
        _local_ids(settings.tokenizer_path, settings.words)
        _check_training(name, settings, template)


def check_tokenizer_path(name: str, path: str, otherwise: str = "") -> None:
    """Raise RewardError for a folder without a tokenizer; ``otherwise``: another remedy."""
    if not Path(path, "tokenizer_config.json").is_file():
        raise RewardError(
            f"reward {name!r}: option tokenizer_path: {path or 'not set'} has no tokenizer_config.json; "
            f"give the served model's folder{otherwise}"
        )


def options_in(options: Mapping[str, Any], kind: type[_Kind]) -> _Kind:
    """The fields of a dataclass among a reward's options."""
    return kind(**{name: options[name] for name in kind.__annotations__ if name in options})


def server_urls(url: str | list[str]) -> list[str]:
    """The addresses in an option ``url``."""
    return [one.rstrip("/") for one in ([url] if isinstance(url, str) else url)]


def _check_training(name: str, settings: JudgeOptions, template: str) -> None:
    yes_words, no_words = ([*words] for words in settings.words)
    now = {"template": ("template", template), "yes_words": ("yes_word", yes_words), "no_words": ("no_word", no_words)}
    check_trained(name, settings.tokenizer_path, "judge", now | {"chat": ("use_chat_template", settings.chat)})


def check_trained(name: str, folder: str, section: str, now: Mapping[str, tuple[str, Any]]) -> None:
    """Check that a model written by `reward-train` is queried as it was trained.

    Args:
        folder: the model's folder; without a record of the training nothing is checked.
        section: part of the record.
        now: options of this run, each with its name in the record and its value; a list there is a choice of words.
    """
    path = Path(folder, _TRAINING_RECORD)
    trained = json.loads(path.read_text(encoding="utf-8")).get(section) if path.is_file() else None
    different = [
        f"{option} is {value!r}, was {trained[key]!r}"
        for option, (key, value) in now.items()
        if trained and value not in (trained[key], [trained[key]])
    ]
    if different:
        raise RewardError(
            f"reward {name!r}: the model in {folder} was trained with other settings ({_TRAINING_RECORD}): "
            f"{'; '.join(different)}. Set the options to the values used in training"
        )


async def prepare_judge(options: Mapping[str, Any]) -> None:
    """Check that every URL is an SGLang server on which each judgment word is a single token.

    Raises RewardError, TemplateError, Transient or RewardCallError.
    """
    settings = options_in(options, JudgeOptions)
    for url in server_urls(settings.url):
        info = await get_json(f"{url}/model_info")
        if not isinstance(info, dict) or "model_path" not in info:
            raise RewardError(f"{url} is not an SGLang server: /model_info answered {str(info)[:200]}")
        await _word_ids(settings, url)


def solution_of(response: str, *, require_think: bool = False, opened_by_prompt: bool = False) -> str | None:
    """Part of a response that is judged: all of it, or the text after its thought; None if the thought is malformed.

    A response without tags is judged whole, unless a thought is required. Any other form (a missing or duplicate tag)
    is a format failure: judging a thought would reward text addressed to the judge.
    """
    tagged = OPEN in response or CLOSE in response
    if not (tagged or require_think or opened_by_prompt):
        return response.strip()
    parts = split_thought(response, opened_by_prompt=opened_by_prompt)
    return None if parts is None else parts[1]


def escape_control_tokens(text: str, tokenizer_path: str) -> str:
    """Remove spellings of the model's control tokens from ``text``: a response must not end its turn and judge itself.

    The tokens are known only with ``tokenizer_path``; with the server's tokenizer the text is unchanged.
    """
    if not tokenizer_path:
        return text
    pattern = _special_pattern(tokenizer_path)
    while pattern is not None and pattern.search(text):  # repeat, because a removal may join the rest into another control token
        text = pattern.sub("", text)
    return text


def judged_text(response: str, settings: JudgeOptions) -> str | None:
    """Text that a judge reads of a response, in training and in scoring; None if the thought is malformed."""
    solution = solution_of(
        response, require_think=settings.require_think, opened_by_prompt=settings.opened_by_prompt
    )
    return None if solution is None else escape_control_tokens(solution, settings.tokenizer_path)


async def judge(texts: Sequence[str], settings: JudgeOptions) -> list[Judgment]:
    """Judge ``texts`` in one request; the servers are used in rotation.

    Raises:
        Transient, RewardCallError: no reply, or an invalid one.
        UserError: judgment words that are not single tokens.
    """
    url = next_server(server_urls(settings.url))
    yes_ids, no_ids = await _word_ids(settings, url)
    # Servers may compute equal texts differently in one batch: sending each text once gives equal probabilities.
    unique = list(dict.fromkeys(texts))
    ids = [*yes_ids, *no_ids]
    body: dict[str, Any] = {
        # Only the log-probs at the sampled token's position are used.
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "token_ids_logprob": [ids] * len(unique),
    }
    if settings.tokenizer_path:
        tokenizer = tokenizer_in(settings.tokenizer_path)
        body["input_ids"] = [tokenizer.encode_prompt(text, chat=settings.chat) for text in unique]
    else:
        body["text"] = unique
    answers = await ask(f"{url}/generate", body, len(unique))
    judgments = {text: read_judgement(answer, yes_ids, no_ids) for text, answer in zip(unique, answers, strict=True)}
    return [judgments[text] for text in texts]


async def ask(url: str, body: Any, num_replies: int) -> list[Any]:
    """The server's replies to a list of inputs; a server that does not answer is skipped for a while.

    Raises:
        Transient, RewardCallError: no reply, or another number of replies.
    """
    server = url.rpartition("/")[0]
    try:
        answers = await post_json(url, body)
    except Transient:
        _down_until[server] = time.monotonic() + _DOWN_S
        raise
    _down_until.pop(server, None)
    if not isinstance(answers, list) or len(answers) != num_replies:
        raise RewardCallError(f"{url}: expected {num_replies} replies, got {str(answers)[:200]}")
    return answers


def next_server(urls: Sequence[str]) -> str:
    """URL whose turn it is, among those that answered last."""
    now = time.monotonic()
    # If all servers are down, try them anyway: they may be back.
    up = [url for url in urls if _down_until.get(url, 0.0) <= now] or urls
    return up[next(_turns) % len(up)]


def read_judgement(answer: Any, yes_ids: Sequence[int], no_ids: Sequence[int]) -> Judgment:
    """Parse the judgment in one reply of ``/generate``.

    Raises:
        Transient: the server aborted the request.
        RewardCallError: log-probs that are missing or not finite, or a request that the server refused.
    """
    try:
        meta = answer["meta_info"]
        refuse_abort(meta["finish_reason"])
        logprobs = {int(token): logprob for logprob, token, *_ in meta["output_token_ids_logprobs"][0]}
        wanted = [logprobs[token] for token in (*yes_ids, *no_ids)]
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise RewardCallError(f"the judge's reply has no log-probs of the judgment words: {str(answer)[:200]}") from error
    if not all(isinstance(x, (int, float)) and math.isfinite(x) for x in wanted):
        raise RewardCallError(f"the judge's log-probs are not finite: {wanted}; do its weights contain NaN?")
    return judgement(wanted[: len(yes_ids)], wanted[len(yes_ids) :])


def refuse_abort(finish_reason: Mapping[str, Any]) -> None:
    """Raise Transient for a request that the server aborted, or RewardCallError for one that it refused."""
    if finish_reason["type"] == "abort":
        refused = finish_reason.get("status_code") == 400
        raise (RewardCallError if refused else Transient)(f"the judge's server aborted the request: {finish_reason}")


def judgement(yes_logprobs: Sequence[float], no_logprobs: Sequence[float]) -> Judgment:
    """Judgment from the log-probs of all forms of yes and no: P(yes) / (P(yes) + P(no)), and P(yes) + P(no) as its mass."""
    yes, no = _log_sum_exp(yes_logprobs), _log_sum_exp(no_logprobs)
    gap = no - yes
    # Use the form that cannot overflow: exp of a large positive gap would.
    probability = 1 / (1 + math.exp(gap)) if gap <= 0 else math.exp(-gap) / (1 + math.exp(-gap))
    return Judgment(probability, min(1.0, math.exp(yes) + math.exp(no)))


def _log_sum_exp(values: Sequence[float]) -> float:
    largest = max(values)
    return largest + math.log(sum(math.exp(value - largest) for value in values))


async def _word_ids(settings: JudgeOptions, url: str) -> _Ids:
    words = settings.words
    if settings.tokenizer_path:
        return _local_ids(settings.tokenizer_path, words)
    known = _token_ids_of_words.setdefault(asyncio.get_running_loop(), {})
    for word in itertools.chain(*words):
        if (url, word) not in known:
            answer = await post_json(f"{url}/tokenize", {"prompt": word, "add_special_tokens": False})
            tokens = answer.get("tokens") if isinstance(answer, dict) else None
            if not isinstance(tokens, list):
                raise RewardError(f"{url}/tokenize answered {str(answer)[:200]}; set option tokenizer_path instead")
            known[url, word] = word_token(lambda _: tokens, word)  # noqa: B023 (called immediately)
    return _split(words, {word: known[url, word] for word in itertools.chain(*words)})


@cache
def _local_ids(tokenizer_path: str, words: _Words) -> _Ids:
    encode = tokenizer_in(tokenizer_path).encode
    return _split(words, {word: word_token(encode, word) for word in itertools.chain(*words)})


def _split(words: _Words, ids: Mapping[str, int]) -> _Ids:
    """Distinct token ids of the yes words and of the no words. Raises RewardError if both have an id in common."""
    yes, no = ({ids[word]: None for word in forms} for forms in words)
    shared = [word for word in words[1] if ids[word] in yes]
    if shared:
        raise RewardError(f"the tokenizer gives {shared} of no_words the token of a yes word")
    return tuple(yes), tuple(no)


@cache
def _special_pattern(path: str) -> re.Pattern[str] | None:
    specials = sorted(filter(None, tokenizer_in(path).special_texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, specials))) if specials else None


@cache
def tokenizer_in(path: str) -> Any:
    """Tokenizer of a folder, loaded once."""
    from megatron_rl.data.tokenizer import Tokenizer  # imports torch, which only some judges need

    return Tokenizer(path)
