"""Generation in windows: every slot grows by at most ``Trajectory.remaining_window``, regardless of server failures.

Invariants: a trajectory continues from its last known token (prompt plus all segments), on any server. Every token
carries the weight version that sampled it. That version is the published one, or the next one if a server restarted
while the policy trained or if weights were published during the window; a reply with two versions becomes several
segments. If a server fails or a request is aborted, another request of the same step fills the window. Once enough
has been generated, unfinished windows keep their tokens and continue in the next step.

Dialogues: when a turn ends, the environment is called immediately and its message joins the history in the same
step, even at the end of a window, so that ``Trajectory.finished`` is right at the end of every step. Messages count
towards the response budget, not towards the window. The state of a dialogue follows from its segments alone.
An environment that waits (``environment_calls.py``) holds no request. Once only such dialogues are left, and have been for
``step_wait_s``, the window ends; the reply joins in a later one. An environment may open further rows of an episode, and may
end a turn that nobody waits for.

A stop string, or the text that precedes FIRE's hot token, may span two windows, so that no server sees all of it.
Such texts are therefore searched here, in all tokens of the turn, and the tokens sampled after them are dropped.
The tokens kept are distributed as if the server had stopped there, because no token depends on later tokens.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from megatron_rl.data.trajectory import Segment, TokenParts, Trajectory, message_segment
from megatron_rl.environments.base import Ended, Message, turn_views
from megatron_rl.families.adapters import served_name
from megatron_rl.rollout.environment_calls import WAIT_POLL_S, OpenRow, Reply
from megatron_rl.rollout.generation import (
    Dialogue,
    GenerationPlan,
    awaits_hot_token,
    current_turn_ids,
    end_of_text,
    hot_token_is_next,
    trajectory_seed,
)
from megatron_rl.rollout.requests import Generation, GenerationRequest, ServerLost
from megatron_rl.rollout.sglang.balance.client import SglangClient
from megatron_rl.rollout.sglang.wire.response_validation import InvalidReply

logger = logging.getLogger(__name__)

_ENOUGH_POLL_S = 0.02
"""Minimum interval between calls of ``is_enough``, which inspects all responses."""
TRAINING = "train"
"""Kind of the windows that train; other kinds start all their dialogues again in every step."""
_UNWANTED_POLL_S = 0.2
_STOP_STRETCH = 64
"""Tokens per request of a turn with stop strings of its own, which only this process knows: the tokens after one are wasted."""
ABORT_REPEAT_S = 0.5
"""Interval after which an abort that overtook its request is resent."""
ABORT_TIMEOUT_S = 60.0
"""Time after which an aborted request that has not returned is dropped, together with its tokens."""


class WindowGenerator:
    """One step's window over a set of trajectories. Used once."""

    def __init__(
        self,
        client: SglangClient,
        recovered: Callable[[ServerLost], Awaitable[None]],
        plan: GenerationPlan,
        *,
        step: int,
        num_tokens: int,
        weight_version: int,
        kind: str,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        """``recovered(lost)`` waits, after the last server was lost, until a server with current weights serves again.

        ``num_tokens``: maximum growth per trajectory. ``kind`` is the prefix of the request ids, so that training
        and evaluation never share one. ``plan.dialogue`` answers trajectories that are dialogues.
        """
        self._client = client
        self._recovered = recovered
        self._plan = plan
        self._step = step
        self._num_tokens = num_tokens
        self._weight_version = weight_version
        newest = weight_version + 1 if plan.trains_meanwhile else weight_version
        self._versions = {str(version): version for version in (weight_version, newest)}
        self._newest_version = str(newest)
        self._kind = kind
        self._warn = warn
        self._rids_in_progress: dict[int, str] = {}
        """Maps trajectory id to its request."""
        self._cut = False
        """True once enough was generated: no more requests are sent."""
        self._closed = asyncio.Event()
        """Set when the window no longer waits for the environment."""
        self._num_waiting = self._num_generated = 0
        self.server_s: dict[int, float] = {}
        """Maps trajectory id to the seconds that the servers report for its requests."""

    async def generate(
        self,
        trajectories: Sequence[Trajectory],
        is_enough: Callable[[], bool] | None = None,
        open_row: OpenRow | None = None,
    ) -> None:
        """Append this step's segments; returns when every trajectory is finished, its window is full, or it waits.

        ``is_enough()`` is called after trajectories end. Once it returns True, the remaining requests are aborted
        and keep the tokens that they have. ``open_row`` makes the trajectory of another row of an episode.
        """
        dialogue = self._plan.dialogue
        waits = dialogue is not None and dialogue.calls.waits
        # A batched reply comes with the slowest of its batch, but an environment that waits should get each turn at once.
        alone = is_enough is not None or waits
        tasks = [asyncio.create_task(self._grow(t, alone=alone)) for t in trajectories]
        watchers = []
        if dialogue is not None and waits:
            if dialogue.calls.in_windows and self._kind == TRAINING:
                watchers.append(asyncio.create_task(self._close_when_all_wait(dialogue, tasks)))
            own = {self._episode(t): t for t in trajectories}
            watchers.append(asyncio.create_task(self._end_unwanted_turns(dialogue, own)))
            if dialogue.environment.branches is not None and open_row is not None:
                watchers.append(asyncio.create_task(self._open_rows(dialogue, own, tasks, open_row)))
        for watcher in watchers:
            watcher.add_done_callback(lambda _: self._closed.set())
        try:
            await (self._until_done(tasks) if is_enough is None else self._until_enough(tasks, is_enough))
            for watcher in watchers:
                if watcher.done():
                    watcher.result()
        finally:
            for task in (*tasks, *watchers):
                task.cancel()
            if dialogue is not None and self._kind != TRAINING:
                dialogue.calls.stop_all([self._episode(t) for t in trajectories])

    async def _until_done(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        while running := [task for task in tasks if not task.done()]:  # also rows that were opened meanwhile
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()  # one failure ends the whole window

    async def _close_when_all_wait(self, dialogue: Dialogue, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Close the window once every response that is not done has waited for the environment for ``step_wait_s``."""
        limit_s = dialogue.calls.limits.step_wait_s
        clock = asyncio.get_running_loop().time
        since_s = clock()
        while True:
            await asyncio.sleep(WAIT_POLL_S)
            only_waits = 0 < self._num_waiting >= sum(not task.done() for task in tasks)
            # A step without any token would train on nothing.
            if not only_waits or not self._num_generated:
                since_s = clock()
            elif clock() - since_s >= limit_s:
                return

    async def _open_rows(
        self, dialogue: Dialogue, own: dict[str, Trajectory], tasks: list[asyncio.Task[None]], open_row: OpenRow
    ) -> None:
        """Grow every further row that the environment asks for. ``own``: this window's trajectories by episode."""
        async for branch in dialogue.calls.branches(own):
            row = open_row(own[branch.parent], branch.message.token_ids)
            row.turn_limit, row.turn_stops = branch.message.max_turn_tokens, branch.message.stop_strings
            own[self._episode(row)] = row
            branch.opened.set_result(self._episode(row))
            tasks.append(asyncio.create_task(self._grow(row, alone=True)))

    async def _end_unwanted_turns(self, dialogue: Dialogue, own: Mapping[str, Trajectory]) -> None:
        """Abort the requests of turns that nobody waits for; ``_append`` then ends them."""
        while True:
            await asyncio.sleep(_UNWANTED_POLL_S)
            ids = [own[episode].id for episode in dialogue.environment.unwanted & own.keys()]
            # Repeated by the loop, because an abort that overtakes its request has no effect.
            await self._client.abort([self._rids_in_progress[id] for id in ids if id in self._rids_in_progress])

    def _episode(self, trajectory: Trajectory) -> str:
        """Name of a dialogue; an evaluation starts dialogues of the same ids again in every step."""
        own_step = "" if self._kind == TRAINING else f"{self._step}-"
        return f"{self._kind}-{own_step}{trajectory.id}"

    async def _until_enough(self, tasks: Sequence[asyncio.Task[None]], is_enough: Callable[[], bool]) -> None:
        event_loop = asyncio.get_running_loop()
        done: list[asyncio.Task[None]] = []
        num_checked = 0
        some_done = asyncio.Event()

        def note_done(task: asyncio.Task[None]) -> None:
            done.append(task)
            some_done.set()

        for task in tasks:
            task.add_done_callback(note_done)

        def num_running() -> int:
            nonlocal num_checked
            for task in done[num_checked:]:
                task.result()  # one failure ends the whole window
            num_checked = len(done)
            return len(tasks) - num_checked

        while num_running() and not is_enough():
            await some_done.wait()
            some_done.clear()
            # Many responses end together, and one check of ``is_enough`` serves all of them.
            await asyncio.sleep(_ENOUGH_POLL_S)
        self._cut = True
        self._closed.set()
        deadline_s = event_loop.time() + ABORT_TIMEOUT_S
        while num_running() and event_loop.time() < deadline_s:
            # Repeated, because an abort that overtakes its request has no effect.
            await self._client.abort(self._rids_in_progress.values())
            with contextlib.suppress(asyncio.TimeoutError):
                async with asyncio.timeout(ABORT_REPEAT_S):
                    while num_running():
                        await some_done.wait()
                        some_done.clear()
        running = num_running()
        if running:
            self._warn(
                f"{running} responses were aborted, but did not return within {ABORT_TIMEOUT_S:.0f} s; they continue "
                "from the tokens of their last reply"
            )

    async def _grow(self, trajectory: Trajectory, *, alone: bool) -> None:
        """Grow one trajectory until it is finished, its window is full or the step has enough."""
        attempt = 0
        if not await self._answer_turn(trajectory):
            return
        while not self._cut and (room := self._room(trajectory)) > 0:
            attempt += 1
            hot = hot_token_is_next(trajectory, self._plan.fire, self._plan.decode)
            # A new id for each attempt, because a server may still run the request of a broken connection.
            rid = f"{self._kind}-{self._step}-{trajectory.id}-{attempt}"
            request = await self._request(trajectory, rid, room, hot=hot)
            if self._cut:
                return  # enough was generated while the images were read
            self._rids_in_progress[trajectory.id] = rid
            try:
                answer = await self._client.generate(request, alone=alone)
            except ServerLost as lost:
                await self._recovered(lost)
                continue
            finally:
                self._rids_in_progress.pop(trajectory.id, None)
            if len(answer.token_ids):
                self._append(trajectory, answer, hot=hot)
                if not await self._answer_turn(trajectory):
                    return

    def _append(self, trajectory: Trajectory, answer: Generation, *, hot: bool) -> None:
        self._check_versions(answer)
        self._num_generated += 1
        trajectory.segments += self._segments(trajectory, answer, hot=hot)
        dialogue = self._plan.dialogue
        if dialogue is not None and self._episode(trajectory) in dialogue.environment.unwanted:
            trajectory.turn_limit = trajectory.num_turn_tokens
        self.server_s[trajectory.id] = self.server_s.get(trajectory.id, 0.0) + answer.seconds
        if answer.routes is not None:
            # Tokens sampled after a stop string were dropped, so their routes are dropped too.
            num_kept = trajectory.num_tokens
            trajectory.routes = self._step, answer.routes[:num_kept]

    def _room(self, trajectory: Trajectory) -> int:
        """Number of tokens that the next request may generate: 0 if the trajectory is finished or its window is full."""
        if trajectory.finished:
            return 0
        rooms = [
            trajectory.remaining_window(self._step, self._num_tokens),
            trajectory.max_response_tokens - trajectory.num_response_tokens,
        ]
        if trajectory.turn_budget:
            rooms.append(trajectory.turn_budget - trajectory.num_turn_tokens)
        if trajectory.turn_stops:
            rooms.append(_STOP_STRETCH)
        return min(rooms)

    async def _request(self, trajectory: Trajectory, rid: str, room: int, *, hot: bool) -> GenerationRequest:
        sampling, fire = self._plan.sampling, self._plan.fire
        request = await sampling.request(
            trajectory.prompt,
            TokenParts(trajectory.token_parts()),
            rid=rid,
            max_new_tokens=room,
            seed=trajectory_seed(sampling.seed, trajectory.id),
            temperature=0.0 if trajectory.greedy else sampling.temperature,
            stop_strings=() if hot else self._server_stops(trajectory),
            weight_version=str(self._weight_version),
            newest_version=self._newest_version,
            adapter=served_name(self._weight_version) if self._plan.has_adapters else "",
            response_name=f"{self._kind}-{trajectory.id}",
            # Only first requests: later ones share few tokens with their group compared to their own response.
            group_name="" if trajectory.segments else trajectory.prompt.id,
            needs_spans=self._plan.published_meanwhile,
        )
        if hot and fire is not None:
            return replace(
                request,
                max_new_tokens=1,
                temperature=fire.temperature,
                top_k=fire.top_k,
                banned_token_ids=tuple({*request.banned_token_ids, *fire.banned_token_ids}),
                # By default SGLang's log-probs are those before top-k: far from the sampling distribution at a high temperature.
                logprobs_after_top_k=fire.top_k > 0,
            )
        return request

    def _turn_stops(self, trajectory: Trajectory) -> tuple[str, ...]:
        dialogue = self._plan.dialogue
        return (*dialogue.environment.stop_strings, *trajectory.turn_stops) if dialogue and trajectory.dialogue else ()

    def _server_stops(self, trajectory: Trajectory) -> tuple[str, ...]:
        dialogue, marker = self._plan.dialogue, self._awaited_marker(trajectory)
        stops = dialogue.server_stops if dialogue and trajectory.dialogue else ()
        return (*stops, marker) if marker else stops

    def _awaited_marker(self, trajectory: Trajectory) -> str:
        """Text after which the hot token is due, or an empty string if none is due."""
        fire = self._plan.fire
        return fire.after if fire is not None and awaits_hot_token(trajectory, fire) else ""

    def _segments(self, trajectory: Trajectory, answer: Generation, *, hot: bool) -> list[Segment]:
        """Segments of the reply, one per weight version, up to the first text that ends the turn or triggers the
        hot token."""
        new_ends = self._new_ends(trajectory, answer, hot=hot)
        token_ids, logprobs, reason = answer.token_ids, answer.logprobs, answer.finish_reason
        if new_ends:
            reason = min(new_ends, key=lambda name: (new_ends[name], name == "length"))
            # Copied, because a view would keep the whole array in memory.
            token_ids, logprobs = token_ids[: new_ends[reason]].copy(), logprobs[: new_ends[reason]].copy()
        elif answer.stop_string and answer.stop_string not in self._turn_stops(trajectory):
            reason = "length"
        num_new = len(token_ids)
        spans = [(version, start, min(end, num_new)) for version, start, end in answer.spans if start < num_new]
        return [
            Segment(
                token_ids=token_ids[start:end],
                rollout_logprobs=logprobs[start:end],
                weight_version=self._versions[version],
                finish_reason=reason if end == num_new else "abort",
                step=self._step,
                turn=trajectory.current_turn,
                role=trajectory.next_role,
                hot=hot,
            )
            for version, start, end in spans
        ]

    def _new_ends(self, trajectory: Trajectory, answer: Generation, *, hot: bool) -> dict[str, int]:
        """Maps finish reason to the number of reply tokens up to the end of a text that ends the turn or triggers
        the hot token."""
        texts = {"stop": self._turn_stops(trajectory)}
        marker = self._awaited_marker(trajectory)
        if marker and not hot:
            texts["length"] = (marker,)
        if not any(texts.values()):
            return {}
        before, decode = current_turn_ids(trajectory), self._plan.decode
        turn_ids = [*before, *answer.token_ids.tolist()]
        ends = {reason: end_of_text(turn_ids, wanted, decode) for reason, wanted in texts.items()}
        # A text that ended in earlier tokens was handled in its own window.
        return {reason: end - len(before) for reason, end in ends.items() if end is not None and end > len(before)}

    async def _answer_turn(self, trajectory: Trajectory) -> bool:
        """Let the environment answer a turn that has just ended: its message joins the history, or the dialogue ends.

        Returns False if the window ends before the environment answers.
        """
        dialogue = self._plan.dialogue
        if dialogue is None or not trajectory.dialogue or trajectory.env_done:
            return True
        opens = dialogue.environment.opens and not trajectory.opened
        if not opens and not trajectory.turn_finished:
            return True
        # Cut by the budget; a turn that stopped on the budget's last token is not cut.
        is_cut = trajectory.finished and trajectory.segments[-1].finish_reason != "stop"
        if is_cut and not dialogue.environment.opens:
            dialogue.calls.stop(self._episode(trajectory))
            return True
        reply = await self._reply(dialogue, trajectory)
        if is_cut:  # a program learns of the cut, and may still leave a result
            if isinstance(reply, Ended):
                trajectory.score, trajectory.graded_text = reply.score, reply.graded_text
            else:
                dialogue.calls.stop(self._episode(trajectory))
            return True
        if isinstance(reply, Message):
            self._add_message(dialogue, trajectory, reply)
        elif not isinstance(reply, asyncio.Task):
            self._end(trajectory, reply)
        return not isinstance(reply, asyncio.Task)

    async def _reply(self, dialogue: Dialogue, trajectory: Trajectory) -> "Reply | asyncio.Task[Reply]":
        """Return the environment's reply, or the open call if the window ends first."""
        episode = self._episode(trajectory)
        asked = dialogue.calls.ask(trajectory, lambda: turn_views(trajectory, self._plan.decode), episode)
        if not isinstance(asked, asyncio.Task):
            return asked
        closed = asyncio.ensure_future(self._closed.wait())
        self._num_waiting += 1
        try:
            await asyncio.wait((asked, closed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._num_waiting -= 1
            closed.cancel()
        return dialogue.calls.result(trajectory, episode, self._step) if asked.done() else asked

    def _add_message(self, dialogue: Dialogue, trajectory: Trajectory, message: Message) -> None:
        trajectory.turn_limit, trajectory.turn_stops = message.max_turn_tokens, message.stop_strings
        if dialogue.environment.opens and not trajectory.opened:
            trajectory.prompt = replace(trajectory.prompt, token_ids=message.token_ids)
            trajectory.opened, trajectory.next_role = True, message.next_role
            return
        token_ids = dialogue.encode_message(message, int(trajectory.token_ids[-1]), trajectory.prompt.chat_arguments)
        # A message that leaves no token for the policy's next turn would only lengthen the response.
        if trajectory.num_response_tokens + len(token_ids) >= trajectory.max_response_tokens:
            trajectory.out_of_room = True
            dialogue.calls.stop(self._episode(trajectory))
            return
        self._add_segment(trajectory, token_ids)
        trajectory.next_role = message.next_role

    def _end(self, trajectory: Trajectory, reply: Ended | None) -> None:
        trajectory.env_done = True
        if reply is not None:
            trajectory.score, trajectory.graded_text = reply.score, reply.graded_text
        if not trajectory.segments or trajectory.segments[-1].step < self._step:
            self._add_segment(trajectory, ())  # so that the dialogue has ended in this step

    def _add_segment(self, trajectory: Trajectory, token_ids: Sequence[int]) -> None:
        trajectory.segments.append(
            message_segment(token_ids, weight_version=self._weight_version, step=self._step, turn=trajectory.current_turn)
        )

    def _check_versions(self, answer: Generation) -> None:
        unknown = [version for version, _, _ in answer.spans if version not in self._versions]
        if unknown:
            raise InvalidReply(
                f"a server sampled with weight version {unknown[0]!r}, but version {self._weight_version} "
                "was published; another trainer may be attached to the same server"
            )
