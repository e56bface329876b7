"""Reward ``genrm``: a generative reward model compares a response with a reference.

The score is the judge's probability that the response is right, in [0, 1] (Seed-Thinking-v1.5; arXiv 2503.22230, where
the reference is the ground truth). The judge sees the prompt, the reference and the response's solution, never its
thought. A malformed thought scores exactly 0 and is not judged.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.data.trajectory import Prompt, Score
from megatron_rl.rewards.judges.judge import (
    DEFAULT_OPTIONS,
    FORMAT_FAILURE,
    JudgeOptions,
    check_judge,
    judge,
    judged_text,
    prepare_judge,
)
from megatron_rl.rewards.judges.templates import JUDGE_TEMPLATE, render_judge
from megatron_rl.rewards.registry import register


def _check(options: Mapping[str, Any]) -> None:
    check_judge("genrm", options, options.get("template", JUDGE_TEMPLATE), ("response",))


def check_prompts(prompts: Sequence[Prompt], options: Mapping[str, Any]) -> list[str]:
    """Problems, with file and line, of prompts without the reference that the template needs."""
    if "{reference}" not in options.get("template", JUDGE_TEMPLATE):
        return []
    return [
        f"{prompt.source or prompt.id}: no reference: the row has neither 'reference' nor 'anchor' nor an answer"
        for prompt in prompts
        if not (prompt.fields.get("reference") or prompt.fields.get("anchor") or prompt.answer)
    ]


@register(
    "genrm",
    prepare=prepare_judge,
    check=_check,
    check_prompts=check_prompts,
    range=(0.0, 1.0),
    row_fields={"reference": ("reference", "anchor")},
    answer_required=False,
)
async def score(
    response: str,
    answer: str,
    *,
    prompt: str,
    reference: str = "",
    template: str = JUDGE_TEMPLATE,
    options: JudgeOptions = DEFAULT_OPTIONS,
) -> Score:
    """Probability that the judge calls the response right.

    Args:
        prompt: Text of the prompt; a row field.
        reference: Text that the response is compared with; a row field (or ``anchor``). Defaults to the answer.
        template: The judge's text with {prompt}, {reference} and {response}.
    """
    solution = judged_text(response, options)
    if solution is None:
        return Score(0.0, FORMAT_FAILURE)
    truth = reference or answer
    if not truth and "{reference}" in template:
        return Score(None, error="no reference: the row has neither 'reference' nor 'anchor' nor an answer")
    (judgment,) = await judge([render_judge(prompt, solution, truth, template)], options)
    return Score(judgment.probability, f"p(right) {judgment.probability:.4f}", metrics={"judgement_mass": judgment.mass})
