"""The interface of an environment, and the registry that finds environments by name.

An environment receives the finished turns and returns the next message, or ends the dialogue. Its name is a registered one
(``pag``) or an import path (``package.module:Class``). Importing this module imports no environment: the registry searches the
modules of this package and of ``megatron_rl.agents`` when a name is looked up.

Invariants: an environment keeps no state. Its decisions follow from the prompt and the turns alone, so that a dialogue
continues identically after a restart, in another window and on another server. ``respond`` is called on the event loop
that communicates with the servers: a plain function must be fast, and one that waits (for a tool, for a program) must be
``async def``. While it waits, its dialogue has no request at a server and the step ends without it
(``environment.step_wait_s``); the message joins in a later window. With a parameter ``episode`` it gets the dialogue's
name, which no other dialogue of the run has, the same in all windows and after a resume: with the number of turns it is
the idempotency key of a call.

Scoring: independent turns are separate episodes, each scored in the step in which the turn ends. A continuous dialogue
is one episode; only its last turn is scored, once the dialogue is finished. In both cases ``turns`` are all finished
turns, and ``grades`` has an entry for each turn whose ``graded_text`` was not None, even if the reward could not score it.
"""

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.data.trajectory import POLICY, Prompt, Score, Trajectory
from megatron_rl.errors import UserError
from megatron_rl.system import plugins

if TYPE_CHECKING:  # loads transformers
    from megatron_rl.data.tokenizer import Tokenizer


class EnvironmentFault(UserError, RuntimeError):
    """An environment that cannot be found or built, or that returned an invalid result."""


@dataclass(frozen=True)
class TurnView:
    """A finished turn, as passed to an environment."""

    role: str
    text: str
    """Decoded text without special tokens; a stop string is included."""
    token_ids: tuple[int, ...]
    finish_reason: str
    """"stop", or "length" if the budget of the turn or of the dialogue truncated the turn."""


@dataclass(frozen=True)
class Message:
    """Text that the environment adds to the dialogue; the model does not train on it."""

    text: str = ""
    next_role: str = POLICY
    """Role of the next turn: one of the environment's roles."""
    verbatim: bool = False
    """True appends the text to the turn directly; False makes it a user message of the chat template, if the run has one."""
    token_ids: tuple[int, ...] = ()
    """Tokens of a message that the environment has encoded itself, instead of ``text``."""
    max_turn_tokens: int = 0
    """Maximum number of tokens of the next turn, below ``environment.max_turn_tokens``; 0: none."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end the next turn, besides those of the environment."""


@dataclass(frozen=True)
class Ended:
    """The end of a dialogue, with its score; without any, ``Environment.outcome`` determines the score."""

    score: Score | None = None
    """A value of None: the dialogue cannot be scored; it is masked and counted, never a reward of 0."""
    graded_text: str | None = None
    """Text that the run's reward scores in place of ``score``."""


@dataclass(eq=False)
class Branch:
    """A request for another row of an episode, beside the dialogue's first one: a history that is no continuation of a row."""

    parent: str
    """Episode of the first row."""
    message: Message
    """Message with the prompt of the new row. What it shares with another row trains there, and nowhere else."""
    opened: "asyncio.Future[str]"
    """Receives the episode of the new row, when a window of the parent's step starts it."""


@dataclass(frozen=True)
class Services:
    """The parts of a run that an environment may use."""

    tokenizer: "Tokenizer"
    server_urls: Callable[[], list[str]]
    """URLs of the SGLang servers that currently run."""
    api_key: str
    """API key of the servers; empty: none."""
    output_dir: Path
    max_prompt_tokens: int
    max_response_tokens: int
    warn: Callable[[str], None]


class Environment(ABC):
    """Base class of environments; the constructor's keyword parameters are the options of the recipe."""

    roles: tuple[str, ...] = (POLICY,)
    """The roles that the model plays."""
    turns_are_independent: bool = False
    """True if each turn is its own episode, whose prompt is the dialogue so far; returns then end with the turn."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end a turn, in addition to the stop tokens."""
    opens: bool = False
    """True if the environment writes the prompt: ``respond`` is asked before the first turn too, without turns, and the
    tokens of its message take the place of the prompt's."""
    branches: "asyncio.Queue[Branch] | None" = None
    """Further rows that the environment wants, for windows to start; None: its dialogues have one row."""
    unwanted: Set[str] = frozenset()
    """Episodes whose current turn nobody waits for any more: a window aborts its request, and the turn ends with its tokens so far."""

    async def start(self, services: Services) -> None:  # noqa: B027
        """Begin to work for a run, on its event loop; called once, before the first dialogue."""

    async def close(self) -> None:  # noqa: B027
        """Release everything that ``start`` and the dialogues hold; called on the event loop at the end of a run."""

    def stop(self, episode: str) -> None:  # noqa: B027
        """Release what a dialogue holds that ended without a reply: its budget is used up, or a deadline has passed."""

    def first_role(self) -> str:
        return self.roles[0]

    @abstractmethod
    def respond(self, prompt: Prompt, turns: Sequence[TurnView]) -> Message | Ended | None:
        """The message after the last of ``turns`` (at least one, but see ``opens``); Ended or None ends the dialogue.

        May be an ``async def``, and may have a third parameter ``episode``.
        """

    @abstractmethod
    def graded_text(self, prompt: Prompt, turns: Sequence[TurnView], index: int) -> str | None:
        """Text of turn ``index`` that the run's reward scores, or None if the reward is not called for this turn."""

    @abstractmethod
    def turn_reward(
        self, prompt: Prompt, turns: Sequence[TurnView], index: int, grades: Mapping[int, Score]
    ) -> Score | None:
        """The reward at the last token of turn ``index``, or None for no reward."""

    @abstractmethod
    def outcome(self, prompt: Prompt, turns: Sequence[TurnView], grades: Mapping[int, Score]) -> Score:
        """The score of the whole dialogue, from which accuracy is computed."""

    def metrics(self, prompt: Prompt, turns: Sequence[TurnView], grades: Mapping[int, Score]) -> dict[str, float]:
        """Metrics of one dialogue; each is averaged over the dialogues that return it."""
        return {}


def turn_views(trajectory: Trajectory, decode: Callable[[Sequence[int]], str]) -> list[TurnView]:
    """The finished turns of a trajectory, in order."""
    return [
        TurnView(
            turn.role, decode(ids), tuple(ids), "stop" if turn.finish_reason == "stop" else "length"
        )
        for turn in trajectory.turns()
        if turn.ended
        for ids in [turn.token_ids.tolist()]
    ]


def turns_to_score(environment: Environment, trajectory: Trajectory, step: int) -> list[int]:
    """Indices of the turns that are scored in ``step``, in order (see the module's docstring for the rule)."""
    ended = [turn.index for turn in trajectory.turn_ended(step)]
    if environment.turns_are_independent:
        return ended
    return ended[-1:] if trajectory.finished else []


_registry = plugins.Registry(
    "environment",
    plugins.Plugin,
    packages=["megatron_rl.environments", "megatron_rl.agents"],
    options_key="environment.options",
    error=EnvironmentFault,
)
register = _registry.register
"""Decorator ``register(name)`` of a subclass of Environment."""


def available() -> list[str]:
    """Names of the registered environments."""
    return sorted(_registry.names())


def build(name: str, options: Mapping[str, Any]) -> Environment:
    """The environment, ready to use.

    Raises:
        EnvironmentFault: unknown name, a module that does not import, a class that is not an Environment, or options
            that are unknown to its constructor, missing, or of the wrong type or value.
    """
    kind = resolve(name)
    _registry.check_options(plugins.Plugin(name, kind), options)
    try:
        environment = kind(**plugins.arguments(kind, options))
    except (TypeError, ValueError) as error:
        raise EnvironmentFault(f"environment {name!r}: {error}; correct environment.options") from error
    if not environment.roles or environment.first_role() not in environment.roles:
        raise EnvironmentFault(
            f"environment {name!r}: expected first_role() to be one of its roles {environment.roles}, "
            f"got {environment.first_role()!r}"
        )
    return environment


def resolve(name: str) -> type[Environment]:
    """The environment class with this name or import path.

    Raises:
        EnvironmentFault: unknown name, or a class that is not a complete subclass of Environment.
    """
    kind = _registry.find(name).function
    if not inspect.isclass(kind) or not issubclass(kind, Environment):
        raise EnvironmentFault(f"environment {name!r}: expected a subclass of Environment, got {kind!r}")
    if inspect.isabstract(kind):
        raise EnvironmentFault(
            f"environment {name!r}: {kind.__name__} lacks the methods {sorted(kind.__abstractmethods__)}"
        )
    return kind
