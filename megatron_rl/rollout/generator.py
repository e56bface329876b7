"""Generation in windows: every slot grows by at most ``window_tokens``, whatever happens to the servers.

Laws: a trajectory continues from its last known token (prompt + all its segments), on whichever server answers; every
token carries the weight version that sampled it, which must be the published one; a window that was cut (a server
died, a request was aborted) is filled up by a further request of the same step.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from megatron_rl.data.trajectory import Segment, Trajectory
from megatron_rl.errors import UserError
from megatron_rl.rollout.client import GenerationRequest, ServerLost, SglangClient


@dataclass(frozen=True)
class Sampling:
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: tuple[int, ...]
    seed: int | None
    """Base of the per-trajectory seeds; None lets the server draw."""


class StaleWeights(UserError, RuntimeError):
    """A server answered with another weight version than the published one."""


class WindowGenerator:
    """``recover(lost)`` returns when a server with current weights serves again after the last one was lost."""

    def __init__(self, client: SglangClient, recover: Callable[[ServerLost], Awaitable[None]]) -> None:
        self._client = client
        self._recover = recover

    async def generate(
        self,
        trajectories: Sequence[Trajectory],
        *,
        step: int,
        window_tokens: int,
        weight_version: int,
        sampling: Sampling,
        kind: str,
        on_progress: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """Append this step's segments; returns when every trajectory is finished or its window is full.

        ``kind`` starts the request ids, so that training and evaluation never share one.
        """
        tasks = [
            asyncio.create_task(
                self._fill_window(
                    t, step, window_tokens, weight_version, sampling, f"{kind}-{step}-{t.id}", on_progress
                )
            )
            for t in trajectories
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _fill_window(
        self,
        trajectory: Trajectory,
        step: int,
        window_tokens: int,
        weight_version: int,
        sampling: Sampling,
        request_name: str,
        on_progress: Callable[[int], None],
    ) -> None:
        attempt = 0
        while not trajectory.finished:
            room = min(
                window_tokens - trajectory.window_tokens(step),
                trajectory.max_response_tokens - trajectory.num_response_tokens,
            )
            if room <= 0:
                return
            attempt += 1
            request = GenerationRequest(
                rid=f"{request_name}-{attempt}",
                input_ids=tuple(trajectory.token_ids),
                max_new_tokens=room,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                stop_token_ids=sampling.stop_token_ids,
                seed=None if sampling.seed is None else trajectory_seed(sampling.seed, trajectory.id),
            )
            try:
                answer = await self._client.generate(request)
            except ServerLost as lost:
                await self._recover(lost)
                continue
            if answer.weight_version != str(weight_version):
                raise StaleWeights(
                    f"a server sampled with weight version {answer.weight_version!r}, but version {weight_version} was "
                    "published; another trainer may be attached to the same server"
                )
            trajectory.segments.append(
                Segment(
                    token_ids=answer.token_ids,
                    rollout_logprobs=answer.logprobs,
                    weight_version=weight_version,
                    finish_reason=answer.finish_reason,
                    step=step,
                )
            )
            on_progress(len(answer.token_ids))


def trajectory_seed(base: int, trajectory_id: int) -> int:
    """One seed a trajectory, the same in every window: the engine hashes it with the token's position."""
    return (base * 1_000_003 + trajectory_id * 7_919) % (2**31 - 1)
