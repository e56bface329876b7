"""PAG's baseline without selection: every answer is revised, whatever the verdict on it."""

from collections.abc import Sequence

from megatron_rl.data.trajectory import POLICY, Prompt
from megatron_rl.environments.base import Message, TurnView
from megatron_rl.environments.pag import VERIFIER, Pag


class AlwaysRevise(Pag):
    """PAG whose verdicts decide nothing; they are rewarded as PAG's."""

    def respond(self, prompt: Prompt, turns: Sequence[TurnView]) -> Message | None:
        num_attempts = sum(turn.role == POLICY for turn in turns)
        if turns[-1].role == VERIFIER and num_attempts < self.max_attempts:
            return Message(self.revise_prompt, next_role=POLICY)
        return super().respond(prompt, turns)
