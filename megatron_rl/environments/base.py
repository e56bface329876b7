"""The interface of an environment: it sees the turns that have ended and returns the next message, or a stop.

Invariants: an environment keeps no state. Everything it decides follows from the prompt and the turns, so that a
dialogue goes on identically after a restart, in another window and on another server. ``respond`` is called on the
event loop that talks to the servers: it must be quick and must not wait.

When rewards are asked for: with independent turns each turn is an episode of its own and is scored in the step in which
it ends; a continuous dialogue is one episode and only its last turn is scored, once the dialogue is finished. In both
cases ``turns`` are all turns that have ended and ``grades`` has an entry for each of them whose ``graded_text`` was not
None, whether the run's reward could score it or not.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.data.trajectory import POLICY, Prompt, Score, Trajectory
from megatron_rl.errors import UserError


class EnvironmentFault(UserError, RuntimeError):
    """An environment that cannot be found or built, or that answered what it must not."""


@dataclass(frozen=True)
class TurnView:
    """A turn that has ended, as an environment sees it."""

    role: str
    text: str
    """Decoded, without special tokens; a stop string is part of it."""
    token_ids: tuple[int, ...]
    finish_reason: str
    """stop, or else it was cut: by the budget of the turn or of the dialogue."""


@dataclass(frozen=True)
class Message:
    """What the environment adds to the history; the model trains on none of it."""

    text: str
    next_role: str = POLICY
    """Who speaks next: one of the environment's roles."""
    verbatim: bool = False
    """False: a user message in the chat template, if the run uses it. True: the text goes on where the turn ended."""


class Environment(ABC):
    """Options are the constructor's keyword parameters."""

    roles: tuple[str, ...] = (POLICY,)
    """The roles that the model plays."""
    turns_are_independent: bool = False
    """Returns are cut at the end of a turn: each is an episode whose prompt is the dialogue so far."""
    stop_strings: tuple[str, ...] = ()
    """A turn ends with any of these, in addition to the stop tokens."""

    def first_role(self) -> str:
        return self.roles[0]

    @abstractmethod
    def respond(self, prompt: Prompt, turns: Sequence[TurnView]) -> Message | None:
        """The answer to the last of ``turns`` (at least one); None ends the dialogue."""

    @abstractmethod
    def graded_text(self, prompt: Prompt, turns: Sequence[TurnView], index: int) -> str | None:
        """What the run's reward grades for turn ``index``; None: the reward is not asked."""

    @abstractmethod
    def turn_reward(
        self, prompt: Prompt, turns: Sequence[TurnView], index: int, grades: Mapping[int, Score]
    ) -> Score | None:
        """The reward at the last token of turn ``index``; None: none."""

    @abstractmethod
    def outcome(self, prompt: Prompt, turns: Sequence[TurnView], grades: Mapping[int, Score]) -> Score:
        """Of the whole dialogue, for accuracy."""

    def metrics(self, prompt: Prompt, turns: Sequence[TurnView], grades: Mapping[int, Score]) -> dict[str, float]:
        """Numbers of one dialogue, averaged over the dialogues that have them."""
        return {}


def turn_views(trajectory: Trajectory, decode: Callable[[Sequence[int]], str]) -> list[TurnView]:
    """The turns that have ended."""
    return [
        TurnView(
            turn.role, decode(ids), tuple(ids), "stop" if turn.finish_reason == "stop" else "length"
        )
        for turn in trajectory.turns()
        if turn.ended
        for ids in [turn.token_ids.tolist()]
    ]


def turns_to_score(environment: Environment, trajectory: Trajectory, step: int) -> list[int]:
    """Indices of the turns whose reward is due in ``step``, in order: the rule of the module's docstring."""
    ended = [turn.index for turn in trajectory.turn_ended(step)]
    if environment.turns_are_independent:
        return ended
    return ended[-1:] if trajectory.finished else []
