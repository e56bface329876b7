"""Calls of a run's environment, which may outlive a window: a call that waits goes on while the run trains.

Invariants: a dialogue has at most one call at a time. A call that another window finds still open is continued, not repeated;
after a restart it is repeated under the same episode name and number of turns. A call ends within its deadline: a dialogue
whose environment does not answer in time ends unscored, which is masked and counted, and never a reward of 0.
"""

import asyncio
import concurrent.futures
import inspect
from collections.abc import AsyncIterator, Callable, Container, Sequence
from dataclasses import dataclass, field

from megatron_rl.config.schema import EnvironmentConfig
from megatron_rl.data.trajectory import Score, Trajectory
from megatron_rl.environments.base import Branch, Ended, Environment, EnvironmentFault, Message, TurnView

Reply = Message | Ended | None
OpenRow = Callable[[Trajectory, Sequence[int]], Trajectory]
"""(first row of an episode, prompt tokens) -> another row of the episode."""
WAIT_POLL_S = 0.02
"""Interval of looks at what waits: all responses for the environment, or a row for the window of its episode."""


@dataclass
class EnvironmentCalls:
    """The open calls of one environment, by episode. Used on the event loop."""

    environment: Environment
    limits: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    in_windows: bool = False
    """True if a step may end while dialogues wait (``step_wait_s``); False: every dialogue is waited for."""
    _open: dict[str, "asyncio.Task[Reply]"] = field(default_factory=dict)
    _began_s: dict[str, float] = field(default_factory=dict)
    _took_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        respond = self.environment.respond
        self._takes_episode = "episode" in inspect.signature(respond).parameters
        self.waits = inspect.iscoroutinefunction(respond)

    def ask(self, trajectory: Trajectory, turns: Callable[[], list[TurnView]], episode: str) -> "Reply | asyncio.Task[Reply]":
        """Return the environment's reply, or the task of the call if the environment may wait.

        Raises EnvironmentFault with the prompt's source if the environment fails or answers something else.
        """
        if not self.waits:
            return self._checked(trajectory, lambda: self._respond(trajectory, turns(), episode))
        if episode not in self._open:
            self._open[episode] = asyncio.create_task(self._call(trajectory, turns(), episode))
        return self._open[episode]

    def result(self, trajectory: Trajectory, episode: str, step: int) -> Reply:
        """Return the reply of a call whose task is done, and note its time; the next ``ask`` begins another call."""
        trajectory.waits[trajectory.current_turn if trajectory.segments else -1] = step, self._took_s.pop(episode, 0.0)
        reply = self._checked(trajectory, self._open.pop(episode).result)
        if not isinstance(reply, Message):
            self._began_s.pop(episode, None)
        return reply

    def stop(self, episode: str) -> None:
        """Tell the environment that a dialogue ended without its reply: the budget is used up, or nobody needs it any more."""
        if call := self._open.pop(episode, None):
            call.cancel()
        self._began_s.pop(episode, None)
        self._took_s.pop(episode, None)
        self.environment.stop(episode)

    def stop_all(self, episodes: Sequence[str] | None = None) -> None:
        """Stop these dialogues, also in the middle of a turn; None: those whose calls are open."""
        for episode in list(self._open) if episodes is None else episodes:
            self.stop(episode)

    async def branches(self, own: Container[str]) -> AsyncIterator[Branch]:
        """Yield the rows that the episodes ``own`` ask for. Other windows' rows stay; those of ended episodes are dropped."""
        waiting = self.environment.branches
        while waiting is not None:
            branch = await waiting.get()
            if branch.parent in own and not branch.opened.cancelled():
                yield branch
            elif not branch.opened.cancelled():
                waiting.put_nowait(branch)
                await asyncio.sleep(WAIT_POLL_S)

    def _respond(self, trajectory: Trajectory, turns: Sequence[TurnView], episode: str) -> "Reply":
        named = {"episode": episode} if self._takes_episode else {}
        return self.environment.respond(trajectory.prompt, turns, **named)

    async def _call(self, trajectory: Trajectory, turns: Sequence[TurnView], episode: str) -> Reply:
        now_s = asyncio.get_running_loop().time()
        left_s = self._began_s.setdefault(episode, now_s) + self.limits.episode_timeout_s - now_s
        limit_s, key = min((self.limits.call_timeout_s, "environment.call_timeout_s"), (left_s, "environment.episode_timeout_s"))
        try:
            async with asyncio.timeout(max(limit_s, 0.0)) as deadline:
                return await self._respond(trajectory, turns, episode)  # type: ignore[misc]
        except TimeoutError:
            if not deadline.expired():  # the environment's own
                raise
            self.environment.stop(episode)
            name = type(self.environment).__name__
            return Ended(Score(None, error=f"environment {name} did not answer turn {len(turns)} of {episode} in time ({key})"))
        finally:
            self._took_s[episode] = asyncio.get_running_loop().time() - now_s

    def _checked(self, trajectory: Trajectory, respond: Callable[[], Reply]) -> Reply:
        source = trajectory.prompt.source or f"prompt {trajectory.prompt.id}"
        name = type(self.environment).__name__
        try:
            reply = respond()
        except Exception as error:  # foreign code may raise anything
            raise EnvironmentFault(
                f"environment {name} failed at {source}: {type(error).__name__}: {error}; respond() must return a Message, "
                "an Ended or None for every text that a model may write"
            ) from error
        roles = self.environment.roles
        if reply is None or isinstance(reply, Ended) or (isinstance(reply, Message) and reply.next_role in roles):
            return reply
        raise EnvironmentFault(
            f"environment {name} answered {reply!r} at {source}: expected None, or a Message whose next_role is one of "
            f"{', '.join(roles)}, or an Ended"
        )


def wait_until_started(started: concurrent.futures.Future[None], name: str, timeout_s: float) -> None:
    """Wait for an environment's ``start``, from another thread than its event loop. Raises EnvironmentFault with the key and the remedy."""
    try:
        started.result(timeout=timeout_s)
    except Exception as error:  # foreign code may raise anything, a TimeoutError too
        problem = f"failed at its start: {type(error).__name__}: {error}"
        if not started.done():
            started.cancel()
            problem = (
                f"did not start within {timeout_s:g} s: start() did not return. Check the servers that it connects to, and leave "
                "waiting for them to the first call of respond(), whose limit is environment.call_timeout_s"
            )
        raise EnvironmentFault(f"environment.name: {name} {problem}") from error
