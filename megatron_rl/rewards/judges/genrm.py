"""Reward ``genrm``: a generative reward model compares a response with a reference.

The score is the judge's probability that the response is right, in [0, 1] (Seed-Thinking-v1.5; arXiv 2503.22230, where
the reference is the ground truth). The judge sees the prompt, the reference and the response's solution, never its
thought. A thought without its proper form scores exactly 0 and is not judged.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.data.trajectory import Prompt, Score
from megatron_rl.rewards.judges.judge import (
    FORMAT_FAILURE,
    JudgeSettings,
    check_judge,
    defused,
    judge,
    prepare_judge,
    solution_of,
)
from megatron_rl.rewards.judges.templates import JUDGE_TEMPLATE, render_judge
from megatron_rl.rewards.registry import register


def check(options: Mapping[str, Any]) -> None:
    check_judge("genrm", options, options.get("template", JUDGE_TEMPLATE), ("response",))


def check_prompts(prompts: Sequence[Prompt], options: Mapping[str, Any]) -> list[str]:
    """Places of prompts without the reference that the template asks for."""
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
    check=check,
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
    url: str | list[str] = "",
    tokenizer_path: str = "",
    template: str = JUDGE_TEMPLATE,
    yes_words: list[str] | None = None,
    no_words: list[str] | None = None,
    chat: bool = False,
    require_think: bool = False,
    opened_by_prompt: bool = False,
) -> Score:
    """Probability that the judge calls the response right.

    Args:
        prompt: Text of the prompt; a row field.
        reference: What the response is compared with; a row field (or ``anchor``). The answer if there is none.
        url: The judge's SGLang server, or several that take turns; must be set.
        tokenizer_path: Folder of the judge's tokenizer; without it the server's tokenizer is used.
        template: The judge's text with {prompt}, {reference} and {response}.
        yes_words: Surface forms of the judgement "right", each one token.
        no_words: Surface forms of the judgement "wrong".
        chat: The text is a user message in the tokenizer's chat template.
        require_think: A response without a thought scores 0.
        opened_by_prompt: The prompt ends with ``<think>`` already.
    """
    solution = solution_of(response, require_think=require_think, opened_by_prompt=opened_by_prompt)
    if solution is None:
        return Score(0.0, FORMAT_FAILURE)
    truth = reference or answer
    if not truth and "{reference}" in template:
        return Score(None, error="no reference: the row has neither 'reference' nor 'anchor' nor an answer")
    settings = JudgeSettings.of(
        dict(url=url, yes_words=yes_words, no_words=no_words, tokenizer_path=tokenizer_path, chat=chat)
    )
    (found,) = await judge([render_judge(prompt, defused(solution, settings), truth, template)], settings)
    return Score(found.probability, f"p(right) {found.probability:.4f}", metrics={"judgement_mass": found.mass})
