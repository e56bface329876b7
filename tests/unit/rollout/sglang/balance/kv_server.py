"""SGLang stub with a KV cache of a given size: a request that grows while the cache is full is retracted and recomputed."""

import asyncio
import random
from collections import defaultdict
from typing import Any

from aiohttp import web

from tests.unit.rollout.sglang.balance.test_client import FakeServer, answer_of

_TICK_S = 0.002


def length_of(rid: str, most: int) -> int:
    """Long-tailed response length, the same on any server: log-normal with its median at a tenth of ``most``."""
    return max(1, min(most, round(most / 10 * random.Random(rid.split("#")[0].rstrip(";")).lognormvariate(0, 1.2))))


class KvServer(FakeServer):
    """All requests grow by ``step_tokens`` per tick, the oldest first."""

    def __init__(self, kv_tokens: int, *, says_so: bool = True, step_tokens: int = 1) -> None:
        super().__init__(self._grow)
        self.kv_tokens, self._says_so, self._step_tokens = kv_tokens, says_so, step_tokens
        self.num_retractions = 0
        self.num_generated = 0
        self.most_held = 0
        self.cached_tokens = self.prompt_tokens = 0
        self.num_ticks = 0
        """Number of ticks in which tokens were generated."""
        self._prefixes: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        """Maps first tokens to the lengths of cached prefixes."""
        self._running: dict[str, list[int]] = {}
        """Maps request id to [tokens stored, tokens left to generate, context tokens]."""
        self._ended: dict[str, asyncio.Future[int]] = {}
        """Number of new tokens of each finished request."""
        self.aborted: set[str] = set()
        self._ticker: asyncio.Task[None] | None = None

    async def _loads(self, http_request: web.Request) -> web.Response:
        load: dict[str, Any] = {"num_running_reqs": len(self._running), "num_used_tokens": self._held()}
        return web.json_response({"loads": [load | ({"max_total_num_tokens": self.kv_tokens} if self._says_so else {})]})

    def _held(self) -> int:
        return sum(held for held, _, _ in self._running.values())

    async def _grow(self, body: dict[str, Any]) -> web.Response:
        self._ticker = self._ticker or asyncio.create_task(self._tick())
        for rid, ids, sampling in zip(body["rid"], body["input_ids"], body["sampling_params"], strict=True):
            num_new = length_of(rid, sampling["max_new_tokens"])
            self.prompt_tokens += len(ids)
            self.cached_tokens += max((n for n in self._prefixes.get(tuple(ids[:8]), ()) if n <= len(ids)), default=0)
            self._prefixes[tuple(ids[:8])].add(len(ids))
            self._running[rid] = [len(ids), num_new, len(ids)]
            self._ended[rid] = asyncio.get_running_loop().create_future()
        return web.json_response([self._answer(rid, await self._ended[rid]) for rid in body["rid"]])

    def _answer(self, rid: str, num_new: int) -> dict[str, Any]:
        aborted = rid in self.aborted
        answer = answer_of(rid, [1], {"type": "abort", "message": "Aborted"} if aborted else None)
        answer["output_ids"] = [1] * num_new
        answer["meta_info"]["output_token_logprobs"] = [[-0.5, 1, None]] * num_new
        return answer

    async def _control(self, http_request: web.Request) -> web.Response:
        rid = (await http_request.json() or {}).get("rid")
        if http_request.match_info["control"] == "abort_request" and rid in self._running:
            held, _, context = self._running.pop(rid)
            self.aborted.add(rid)
            self._ended[rid].set_result(held - context)
        return web.Response()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            room = self.kv_tokens
            self.num_ticks += bool(self._running)
            for rid, request in list(self._running.items()):
                held, left, context = request
                if held + self._step_tokens > room:
                    if held > context:
                        self.num_retractions += 1
                        request[:] = [context, left + held - context, context]
                    continue
                room -= held + self._step_tokens
                num_new = min(self._step_tokens, left)
                self.num_generated += num_new
                request[:] = [held + num_new, left - num_new, context]
                if left <= self._step_tokens:
                    del self._running[rid]
                    self._ended[rid].set_result(held + num_new - context)
            self.most_held = max(self.most_held, self.kv_tokens - room)

    async def stop(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        await super().stop()
