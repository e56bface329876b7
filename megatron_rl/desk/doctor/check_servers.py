"""Servers of this installation that score recorded tokens, in the place of sampling some. Part of ``megatron-rl check``."""

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
    """The record's tokens; ``logprobs`` are the servers' of those of the newest step, the mean of each sequence."""

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
            # From the token before the first one: that one's log-prob is of what comes after it.
            "logprob_start_len": max(0, len(ids) - num_new - 1),
        }
        address = self.service.addresses()[0]
        said = orjson.loads(await post_json(http, address, "/generate", body, _TIMEOUT_S))
        found = [entry[0] for entry in said["meta_info"]["input_token_logprobs"]][-num_new:]
        if len(found) != num_new or None in found:
            raise UserError(f"server {address.url} scored {len(found)} of {num_new} tokens; see its log")
        return sum(found) / num_new
