"""Reward ``pairwise``: how likely a judge prefers the response to the prompt's anchor (Pairwise-RL, arXiv 2504.04950).

    s(x, y, a) = 0.5 * [ p(1st better | x, y, a) + 1 - p(1st better | x, a, y) ]

Both orders are scored in one request, which cancels the judge's position bias. 0.5 means as good as the anchor.

Laws: s is in [0, 1]; s(x, y, a) + s(x, a, y) = 1; s(x, a, a) = 0.5. A prompt has one anchor during a run, so that the
reward is a function of prompt and response. The judge sees solutions only: a malformed thought scores exactly 0
and is not judged. The judge's position bias is logged: ``swap_consistency`` (both orders give the same winner),
``position_gap`` |p(1st | y, a) - (1 - p(1st | a, y))| and ``first_bias``, the same difference with its sign.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.data.trajectory import Prompt, Score
from megatron_rl.errors import DataError
from megatron_rl.rewards.judges.judge import (
    DEFAULT_OPTIONS,
    FORMAT_FAILURE,
    JudgeOptions,
    Judgment,
    check_judge,
    judge,
    judged_text,
    prepare_judge,
)
from megatron_rl.rewards.judges.templates import PAIRWISE_FIELDS, PAIRWISE_TEMPLATE, render_pairwise
from megatron_rl.rewards.registry import register


def _check(options: Mapping[str, Any]) -> None:
    check_judge("pairwise", options, options.get("template", PAIRWISE_TEMPLATE), PAIRWISE_FIELDS)


def check_prompts(prompts: Sequence[Prompt], options: Mapping[str, Any]) -> list[str]:
    """Problems, with file and line, of prompts without an anchor, with a malformed anchor, or with two different
    anchors."""
    problems = []
    anchors: dict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    for prompt in prompts:
        place = prompt.source or prompt.id
        anchor = prompt.fields.get("anchor") or prompt.answer
        if not anchor:
            problems.append(f"{place}: no anchor: the row has neither 'anchor' nor an answer")
        elif _read_of_anchor(anchor, DEFAULT_OPTIONS) is None:
            problems.append(
                f"{place}: the anchor's thought has no proper form; expected <think>thought</think>solution"
            )
        else:
            # Prompts with the same text but other images are different prompts.
            anchors[prompt.text, *(image.digest for image in prompt.images)].setdefault(anchor, place)
    for found in anchors.values():
        if len(found) > 1:
            places = ", ".join(found.values())
            problems.append(f"{places}: the same prompt has {len(found)} anchors; expected exactly one")
    return problems


def combine_orders(forward: float, backward: float) -> tuple[float, dict[str, float]]:
    """(score, metrics) from p(1st better) of (response, anchor) and of (anchor, response).

    Same as ``algorithms.pairwise_score`` and ``swap_consistency``, but for one pair and without tensors.
    """
    behind = 1.0 - backward
    metrics = {
        "swap_consistency": float((forward - 0.5) * (behind - 0.5) >= 0),
        "position_gap": abs(forward - behind),
        "first_bias": forward - behind,
    }
    return 0.5 * (forward + behind), metrics


def _read_of_anchor(text: str, settings: JudgeOptions) -> str | None:
    """Text that the judge reads of an anchor or training text; None if its thought is malformed.

    Such a text contains both thought tags or none, so ``require_think`` and ``opened_by_prompt`` do not apply.
    """
    return judged_text(text, replace(settings, require_think=False, opened_by_prompt=False))


def render_both_orders(prompt: str, first: str, second: str, template: str = PAIRWISE_TEMPLATE) -> tuple[str, str]:
    """Render a pair in both orders: ``first`` before ``second``, and after it."""
    return render_pairwise(prompt, first, second, template), render_pairwise(prompt, second, first, template)


def training_texts(prompt: str, chosen: str, rejected: str, *, place: str, tokenizer_path: str) -> tuple[str, str]:
    """``render_both_orders`` of a preference row, exactly as the judge is queried about such responses.

    Args:
        place: Source of the row (file:line), for errors.
        tokenizer_path: Tokenizer folder of the judge that is trained.

    Raises:
        DataError: a malformed thought, or two texts that do not differ after cleaning.
    """
    settings = JudgeOptions(tokenizer_path=tokenizer_path)
    read = {"chosen": _read_of_anchor(chosen, settings), "rejected": _read_of_anchor(rejected, settings)}
    for field, text in read.items():
        if text is None:
            raise DataError(
                f"{place}: field {field!r}: its thought has no proper form; a judge sees only solutions, so expected "
                "<think>thought</think>solution, or a solution without tags"
            )
        if not text.strip():
            raise DataError(f"{place}: field {field!r}: nothing is left of it without control tokens; remove the row")
    if read["chosen"] == read["rejected"]:
        raise DataError(
            f"{place}: fields 'chosen' and 'rejected' have the same solution, {str(read['chosen'])[:80]!r}, and a judge "
            "sees only solutions; remove the row"
        )
    return render_both_orders(prompt, read["chosen"] or "", read["rejected"] or "")


@register(
    "pairwise",
    prepare=prepare_judge,
    check=_check,
    check_prompts=check_prompts,
    range=(0.0, 1.0),
    row_fields={"anchor": ("anchor",)},
    answer_required=False,
)
async def score(
    response: str,
    answer: str,
    *,
    prompt: str,
    anchor: str = "",
    template: str = PAIRWISE_TEMPLATE,
    options: JudgeOptions = DEFAULT_OPTIONS,
) -> Score:
    """Probability that the judge prefers the response to the anchor, averaged over both orders of the two texts.

    Args:
        prompt: Text of the prompt; a row field.
        anchor: Text that the response is compared with; a row field. Defaults to the answer.
        template: The judge's text with {prompt}, {first} and {second}, the same as in training (`reward-train`).
    """
    solution = judged_text(response, options)
    if solution is None:
        return Score(0.0, FORMAT_FAILURE)
    # A missing anchor is a fault of the data, so the response is unscored instead of 0.
    other = _read_of_anchor(anchor or answer, options)
    if not other:
        return Score(None, error="no anchor: the row has neither a proper 'anchor' nor an answer")
    forward, backward = await judge(render_both_orders(prompt, solution, other, template), options)
    return _score(forward, backward)


def _score(forward: Judgment, backward: Judgment) -> Score:
    value, metrics = combine_orders(forward.probability, backward.probability)
    detail = f"p(1st) {forward.probability:.4f} before the anchor, {backward.probability:.4f} after it"
    return Score(value, detail, metrics={**metrics, "judgement_mass": min(forward.mass, backward.mass)})
