"""Servers of this installation that score recorded tokens instead of sampling. Part of ``megatron-rl check``."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from megatron_rl.data.trajectory import Trajectory
from megatron_rl.desk.doctor.mismatch_ranks import post_json
from megatron_rl.desk.doctor.step_replay import RecordedServers
from megatron_rl.errors import UserError
from megatron_rl.rollout.service import RolloutService
from megatron_rl.system.http.json_http import HttpSession

_TIMEOUT_S = 300.0


@dataclass
class ScoringServers(RecordedServers):
    """Replays the record's tokens; ``logprobs`` are the servers' means per sequence, over the newest step's tokens."""

    service: RolloutService | None = None
    logprobs: list[float] = field(default_factory=list)

    async def generate(
        self, trajectories: Sequence[Trajectory], *, step: int, window_tokens: int, is_enough: Any = None
    ) -> dict[int, float]:
        await super().generate(trajectories, step=step, window_tokens=window_tokens)
        grown = [t for t in trajectories if t.window_tokens(step)]
        async with HttpSession() as http:
            self.logprobs = list(await asyncio.gather(*(self._score(http, t, step) for t in grown)))
        return {}

    def publish(self) -> Any:
        super().publish()
        assert self.service is not None, "given with the first publish"
        return self.service.publish()

    async def _score(self, http: HttpSession, trajectory: Trajectory, step: int) -> float:
        assert self.service is not None, "given with the first publish"
        num_new, ids = trajectory.window_tokens(step), trajectory.token_ids
        body = {
            "input_ids": [int(token) for token in ids],
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            # Start one token early: the log-prob at an index is that of the token after it.
            "logprob_start_len": max(0, len(ids) - num_new - 1),
        }
        address = self.service.addresses()[0]
        reply = orjson.loads(await post_json(http, address, "/generate", body, _TIMEOUT_S))
        logprobs = [entry[0] for entry in reply["meta_info"]["input_token_logprobs"]][-num_new:]
        if len(logprobs) != num_new or None in logprobs:
            raise UserError(f"server {address.url} scored {len(logprobs)} of {num_new} tokens; see its log")
        return sum(logprobs) / num_new
