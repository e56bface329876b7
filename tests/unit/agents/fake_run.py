"""A run without a model: windows that answer an environment's messages with given texts, and a template of plain characters."""

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aiohttp import web

from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import Prompt
from megatron_rl.environments.base import Ended, Environment, Message, Services, TurnView
from megatron_rl.system.http.json_http import HttpSession


def services(folder: Path, tokenizer: Any, **changes: Any) -> Services:
    fields = dict(
        tokenizer=tokenizer,
        server_urls=lambda: [],
        api_key="",
        output_dir=folder,
        max_prompt_tokens=4000,
        max_response_tokens=4000,
        warn=print,
    )
    return Services(**{**fields, **changes})


class FakeRun:
    """Grows the rows of an environment: ``answer(prompt text so far, number of turns)`` gives the text of a turn.

    A turn that nobody wants ends with the letter x, one that exceeds a message's limits ends there.
    """

    def __init__(self, environment: Environment, tokenizer: Tokenizer, stop_id: int) -> None:
        self.environment = environment
        self.decode, self.encode, self.stop_id = tokenizer.decode, tokenizer.encode, stop_id
        self.answer: Callable[[str, int], Any] = lambda text, turns: f"answer {turns}"
        self.rows: dict[str, SimpleNamespace] = {}
        self._tasks: list[asyncio.Task[Any]] = []

    async def episode(self, name: str = "train-0", prompt: Prompt | None = None) -> Ended:
        return await self._grow(name, prompt or Prompt("p", (5,), text="the task", answer="42"))

    async def open_branches(self) -> None:
        assert self.environment.branches is not None
        while True:
            branch = await self.environment.branches.get()
            name = f"branch-{len(self._tasks)}"
            branch.opened.set_result(name)
            prompt = Prompt("p", branch.message.token_ids)
            self._tasks.append(asyncio.create_task(self._grow(name, prompt, branch.message)))

    async def _unless_unwanted(self, name: str, said: Any) -> Any:
        sampling = asyncio.ensure_future(said)
        while not sampling.done():
            await asyncio.wait([sampling], timeout=0.02)
            if name in self.environment.unwanted:
                sampling.cancel()
                return "x", "length"
        return sampling.result()

    async def _grow(self, name: str, prompt: Prompt, reply: Message | None = None) -> Ended:
        row = self.rows[name] = SimpleNamespace(ids=list(reply.token_ids if reply else []), spans=[], ended=None)
        views: list[TurnView] = []
        while True:
            if reply is None or views:
                reply = await self.environment.respond(prompt, tuple(views), episode=name)  # type: ignore[call-arg, misc]
                if isinstance(reply, Ended):
                    row.ended = reply
                    return reply
                assert isinstance(reply, Message)
                row.ids += reply.token_ids
            said = self.answer(self.decode(row.ids), len(views))
            text, reason = (await self._unless_unwanted(name, said) if asyncio.iscoroutine(said) else said), "stop"
            if isinstance(text, tuple):
                text, reason = text
            turn = [*self.encode(text), *([self.stop_id] if reason == "stop" else [])]
            if ends := [text.index(stop) + len(stop) for stop in reply.stop_strings if stop in text]:
                turn = self.encode(text[: min(ends)])
            if 0 < reply.max_turn_tokens < len(turn):
                turn, reason = turn[: reply.max_turn_tokens], "length"
            row.spans.append((len(row.ids), len(turn)))
            row.ids += turn
            views.append(TurnView("policy", text, tuple(turn), reason))


@asynccontextmanager
async def website():
    """HTTP tools, SGLang's parsing route, and an MCP server; ``seen`` has their requests."""
    seen: list[Any] = []
    state = SimpleNamespace(failures=0, delay_s=0.0)

    async def tool(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        seen.append((request.headers["Idempotency-Key"], body))
        if state.failures:
            state.failures -= 1
            raise web.HTTPServiceUnavailable
        await asyncio.sleep(state.delay_s)
        return web.Response(text=f"sum {sum(body['numbers'])}") if "numbers" in body else web.Response(status=422, text="numbers?")

    async def parse(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["tool_call_parser"] == "qwen25" and body["tools"][0]["type"] == "function"
        found = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", body["text"], re.DOTALL)
        calls = [json.loads(text) for text in found]
        normal = body["text"].partition("<tool_call>")[0]
        named = [{"tool_index": 0, "name": c["name"], "parameters": json.dumps(c["arguments"])} for c in calls]
        return web.json_response({"normal_text": normal, "calls": named})

    async def mcp(request: web.Request) -> web.StreamResponse:
        message = await request.json()
        seen.append((request.headers.get("Mcp-Session-Id"), message["method"]))
        if "id" not in message:
            return web.Response(status=202)
        results: dict[str, Any] = {
            "initialize": {"protocolVersion": "2025-06-18"},
            "tools/list": {"tools": [{"name": "look", "inputSchema": {"type": "object"}}]},
            "tools/call": {"content": [{"type": "text", "text": "seen"}]},
        }
        answer = {"jsonrpc": "2.0", "id": message["id"], "result": results[message["method"]]}
        if message["method"] == "tools/call":
            events = [{"jsonrpc": "2.0", "method": "notifications/progress"}, answer]
            text = "".join(f"event: message\ndata: {json.dumps(event)}\n\n" for event in events)
            return web.Response(text=text, content_type="text/event-stream")
        return web.json_response(answer, headers={"Mcp-Session-Id": "s1"})

    app = web.Application()
    app.add_routes([web.post("/sum", tool), web.post("/parse_function_call", parse), web.post("/mcp", mcp)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with HttpSession() as session:
        yield SimpleNamespace(url=url, seen=seen, state=state, session=session, runner=runner)
    await runner.cleanup()
