r"""Reward ``choice``: 1.0 if a response picks the right letter of a multiple-choice question, else 0.0.

Invariant: a letter counts only in an answer position (in ``\boxed{}``, after "answer is", or at the start of the last line
before a bracket, a period, a colon or the end). The article "A" in running text is not a pick, and several letters are not
a pick either.
"""

import re

from megatron_rl.data.trajectory import Score
from megatron_rl.graders.answers.final_answer import boxed_answer, hedged, phrase_answer, solution_of
from megatron_rl.rewards.registry import register

_LEAD = r"[\s*_`\"'(\[$]*(?:[Oo]ption\s+|[Cc]hoice\s+)?[*(\[$]*"
_PICK = re.compile(_LEAD + r"([A-Za-z])(?:[\s*_`\"')\].,:$]*$|[)\].:*$]|\s+[-:])")
_PICK_BEFORE_WORDS = re.compile(
    _LEAD + r"(?:([B-HJ-Z])[\s,;*]|([A-Za-z])[\s,;*]+(?:because|since|as|for|which|given)\b)"
)
"""Pick in "the answer is B because": neither the article A nor the pronoun I, unless a reason follows."""
_ANOTHER = re.compile(
    r"[\s*)\].,:;/|&]*(?:\b(?:or|and|maybe|perhaps)\b[\s*(\[]*(?:option\s+)?)*[(\[]*([A-Za-z])(?![A-Za-z'])",
    re.IGNORECASE,
)
"""Second letter directly after the first: (A) (B), A or B, A, B."""
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")


def _picked_letter(text: str, *, in_sentence: bool = False) -> str | None:
    """Letter, in upper case, that ``text`` starts with as a pick: ``B``, ``(b)``, ``**B.** Paris``, ``option B``.

    None if there is no such letter. ``in_sentence``: words may follow the letter, as in "(the answer is) B because".
    """
    text = _TEXT.sub(r"\1", text)
    match = _PICK.match(text) or (_PICK_BEFORE_WORDS.match(text) if in_sentence else None)
    if match is None:
        return None
    group = 1 if match.group(1) else 2
    another = _ANOTHER.match(text, match.end(group))
    if another and (another.group(1).isupper() or another.group(1) not in "ai"):
        return None
    return match.group(group).upper()


@register("choice", range=(0.0, 1.0))
def score(response: str, answer: str, *, letters: str = "ABCDEFGHIJ") -> Score:
    """Score 1.0 if the picked letter is ``answer``, else 0.0; unscored for an ``answer`` outside ``letters``.

    A thought is ignored.

    Args:
        letters: Letters that may be picked.
    """
    truth = _picked_letter(answer)
    if truth is None or truth not in letters.upper():
        return Score(None, error=f"the ground truth {answer[:80]!r} is not one of the letters {letters}")
    solution = solution_of(response)
    if solution is None:
        return Score(0.0, "the thought does not end")
    lines = solution.strip().rsplit("\n", 1)
    phrase = phrase_answer(solution)
    places = {"boxed": boxed_answer(solution), "answer is": phrase, "last line": lines[-1]}
    for place, text in places.items():
        if text is None:
            continue
        picked = _picked_letter(text, in_sentence=place == "answer is")
        if picked is not None and picked in letters.upper():
            return Score(float(picked == truth), f"{place}: {picked}")
        if place == "answer is" and hedged(text or "not"):
            break  # denied, or one of several
    return Score(0.0, "no letter picked")
