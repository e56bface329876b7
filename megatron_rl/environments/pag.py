"""PAG: the policy answers, verifies its own answer and revises it only after a verdict "wrong" (arXiv 2506.10406).

A dialogue is y1 v1 [y2 v2 ...]: answers of the role ``policy``, verdicts of the role ``verifier``. The dialogue ends
with the verdict "correct", with an unreadable verdict, or with the last attempt. Turns are independent: each is an
episode, rewarded at its last token.

Rewards: R_y(t) is the run's reward of the answer, plus ``bonus * (R_y(t) - R_y(t-1))`` from the second answer on (the
paper's shaping, with alpha = ``bonus``). R_v(t) is 1 if the verdict agrees with the reward of y_t, else 0; an unreadable
verdict gets 0.
"""

from collections.abc import Mapping, Sequence

from megatron_rl.data.trajectory import POLICY, Prompt, Score
from megatron_rl.environments.base import Environment, Message, TurnView, register

VERIFIER = "verifier"

VERIFY_PROMPT = (
    "Check the math solution step-by-step. If you find a mistake: state the wrong step, explain why it's wrong, and "
    "end your response with 'The answer is wrong'. If all steps are correct, end your response with 'The answer is "
    "correct'."
)
REVISE_PROMPT = (
    "You indicated that your previous answer was wrong. Please provide the correct solution to the math problem."
)


@register("pag")
class Pag(Environment):
    roles = (POLICY, VERIFIER)
    turns_are_independent = True

    def __init__(
        self,
        *,
        max_attempts: int = 2,
        bonus: float = 1.0,
        verify_last: bool = True,
        correct_from: float = 1.0,
        verify_prompt: str = VERIFY_PROMPT,
        revise_prompt: str = REVISE_PROMPT,
        correct_verdict: str = "The answer is correct",
        wrong_verdict: str = "The answer is wrong",
    ) -> None:
        """
        Args:
            max_attempts: Maximum number of answers per dialogue (T_max).
            bonus: alpha of the shaping on answers after the first.
            verify_last: Verify the last attempt also. With False and one attempt: plain single-turn PPO.
            correct_from: Smallest reward of a correct answer.
            verify_prompt, revise_prompt: Messages before a verdict and before a revised answer.
            correct_verdict, wrong_verdict: Endings of a verdict.
        """
        if max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, got {max_attempts}")
        # A text that ends with the other would match both verdicts.
        verdicts = [_letters(correct_verdict), _letters(wrong_verdict)]
        if not all(verdicts) or verdicts[0].endswith(verdicts[1]) or verdicts[1].endswith(verdicts[0]):
            raise ValueError(
                f"correct_verdict and wrong_verdict must be texts, and neither may end with the other, got "
                f"{correct_verdict!r} and {wrong_verdict!r}"
            )
        self.max_attempts = max_attempts
        self.bonus = bonus
        self.verify_last = verify_last
        self.correct_from = correct_from
        self.verify_prompt = verify_prompt
        self.revise_prompt = revise_prompt
        self._verdicts = {verdicts[0]: True, verdicts[1]: False}

    def verdict(self, text: str) -> bool | None:
        """The verdict in ``text``: True for correct, False for wrong, None if unreadable.

        A readable verdict ends with one of the two sentences; case, spacing, final punctuation and markup are ignored.
        """
        letters = _letters(text)
        for sentence, is_correct in self._verdicts.items():
            if letters == sentence or letters.endswith(" " + sentence):
                return is_correct
        return None

    def respond(self, prompt: Prompt, turns: Sequence[TurnView]) -> Message | None:
        last, num_attempts = turns[-1], sum(turn.role == POLICY for turn in turns)
        if last.role == POLICY:
            if num_attempts == self.max_attempts and not self.verify_last:
                return None
            return Message(self.verify_prompt, next_role=VERIFIER)
        if self.verdict(last.text) is False and num_attempts < self.max_attempts:
            return Message(self.revise_prompt, next_role=POLICY)
        return None

    def graded_text(self, prompt: Prompt, turns: Sequence[TurnView], index: int) -> str | None:
        return turns[index].text if turns[index].role == POLICY else None

    def turn_reward(
        self, prompt: Prompt, turns: Sequence[TurnView], index: int, grades: Mapping[int, Score]
    ) -> Score | None:
        if turns[index].role == VERIFIER:
            return self._verdict_reward(turns[index], grades[index - 1])
        grade = grades[index]
        if index == 0 or not self.bonus:
            return grade
        before = grades[index - 2]  # the verdict on it is between them
        if grade.value is None or before.value is None:
            return Score(None, error=grade.error or f"the bonus needs the score of the previous answer: {before.error}")
        return Score(grade.value + self.bonus * (grade.value - before.value), grade.detail)

    def outcome(self, prompt: Prompt, turns: Sequence[TurnView], grades: Mapping[int, Score]) -> Score:
        """The score of the last answer."""
        return grades[max(grades)]

    def metrics(self, prompt: Prompt, turns: Sequence[TurnView], grades: Mapping[int, Score]) -> dict[str, float]:
        """Metrics of one dialogue, each in [0, 1]; a metric without a scored answer or a verdict is absent.

        ``first_accuracy``, ``final_accuracy``: 1 if the first or the last answer is correct. ``revised``: 1 if there
        is more than one answer. ``verifier_accuracy``: fraction of verdicts that agree with the reward.
        ``unreadable_verdicts``: fraction of verdicts that cannot be read.
        """
        values = {"revised": float(len(grades) > 1)}
        for name, grade in (("first_accuracy", grades[min(grades)]), ("final_accuracy", grades[max(grades)])):
            if grade.value is not None:
                values[name] = float(grade.value >= self.correct_from)
        verdicts = [(i, turn) for i, turn in enumerate(turns) if turn.role == VERIFIER]
        if verdicts:
            unreadable = [self.verdict(turn.text) is None for _, turn in verdicts]
            values["unreadable_verdicts"] = sum(unreadable) / len(unreadable)
        rewards = [self._verdict_reward(turn, grades[i - 1]).value for i, turn in verdicts]
        known = [reward for reward in rewards if reward is not None]
        if known:
            values["verifier_accuracy"] = sum(known) / len(known)
        return values

    def _verdict_reward(self, turn: TurnView, grade: Score) -> Score:
        verdict = self.verdict(turn.text)
        if verdict is None:
            return Score(0.0, "the verdict is unreadable")
        if grade.value is None:
            return Score(None, error=f"the verified answer could not be scored: {grade.error}")
        truth = grade.value >= self.correct_from
        return Score(float(verdict == truth), f"the verdict is {_label(verdict)}, the answer is {_label(truth)}")


def _label(is_correct: bool) -> str:
    return "correct" if is_correct else "wrong"


def _letters(text: str) -> str:
    """``text`` in lower case, with single spaces, and without punctuation or markup around words."""
    words = (word.strip("*_`'\"“”\u2018\u2019().,:;!?\\$ ") for word in text.lower().split())
    return " ".join(word for word in words if word)
