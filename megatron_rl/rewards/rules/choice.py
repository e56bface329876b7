r"""Reward ``choice``: 1.0 if a response picks the right letter of a multiple-choice question, else 0.0.

Invariant: a letter counts only where an answer stands (``\boxed{}``, after "answer is", or at the start of the
last line before a bracket, a point, a colon or nothing); the article "A" in running text is not a pick.
"""

import re

from megatron_rl.data.trajectory import Score
from megatron_rl.rewards.registry import register
from megatron_rl.rewards.rules.answers import boxed_answer, phrase_answer

_LEAD = r"[\s*_`\"'(\[]*(?:[Oo]ption\s+|[Cc]hoice\s+)?[*(\[]*"
_PICK = re.compile(_LEAD + r"([A-Za-z])(?:[\s*_`\"')\].,:]*$|[)\].:]|\s+[-:])")
_PICK_BEFORE_WORDS = re.compile(_LEAD + r"([B-HJ-Z])[\s,;*]")
"""For "the answer is B because": neither the article A nor the pronoun I."""
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")


def _picked_letter(text: str) -> str | None:
    """The letter, in upper case, that ``text`` starts with as pick: ``B``, ``(b)``, ``**B.** Paris``, ``option B``."""
    match = _PICK.match(_TEXT.sub(r"\1", text))
    return match.group(1).upper() if match else None


@register("choice", range=(0.0, 1.0))
def score(response: str, answer: str, *, letters: str = "ABCDEFGHIJ") -> Score:
    """Compare the picked letter with ``answer``, which is a letter itself.

    Args:
        letters: The letters that may be picked.
    """
    truth = _picked_letter(answer)
    if truth is None or truth not in letters.upper():
        return Score(None, error=f"the ground truth {answer[:80]!r} is not one of the letters {letters}")
    lines = response.strip().rsplit("\n", 1)
    places = {"boxed": boxed_answer(response), "answer is": phrase_answer(response), "last line": lines[-1]}
    for place, text in places.items():
        if not text:
            continue
        picked = _picked_letter(text)
        if picked is None and place == "answer is":
            match = _PICK_BEFORE_WORDS.match(text)
            picked = match.group(1) if match else None
        if picked is not None and picked in letters.upper():
            return Score(float(picked == truth), f"{place}: {picked}")
    return Score(0.0, "no letter picked")
