"""Measure the agents' endpoint: tokens/s against the same prompts without it, its CPU time, rows, and the event loop under waiting tools.

    python tools/bench_agents.py MODEL --forward-ms 20 --json found.json

``MODEL``: folder of a model with a chat template; a CPU server loads it, and takes at least ``--forward-ms`` per decoding step, as a
GPU's would. ``--programs`` conversations run beside each other: a process of clients sends ``--turns`` requests of OpenAI's chat
each, with the whole history; every answer has at most ``--turn-tokens`` tokens. Then as many slots have the same contexts completed
one after the other, without programs and endpoint. Both are repeated in turn. CPU seconds are those of this process, which has the
endpoint, the windows and the calls to the server; the difference of the two is the endpoint's. With ``--no-server`` every answer has
``--turn-tokens`` random tokens, after ``--forward-ms`` each: neither a server nor its calls take CPU time.

At the end ``--tools`` HTTP tools wait at a time: the loop's lag is the delay of a 5 ms sleep, by the clock, and in CPU seconds of
this process (other processes share the cores of a test machine).
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from megatron_rl.agents.chat_template import ChatTemplate
from megatron_rl.agents.conversation import Conversation
from megatron_rl.agents.endpoint import Endpoint
from megatron_rl.agents.episodes import Episode, EpisodeLimits
from megatron_rl.agents.tools import call_tool, make_tool
from megatron_rl.agents.turn_text import Parsers, parse_turn
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import Prompt, Score, Trajectory
from megatron_rl.environments.base import Branch, Ended, Environment, Message
from megatron_rl.rollout.generation import GenerationPlan, Sampling, make_dialogue
from megatron_rl.rollout.requests import Generation
from megatron_rl.rollout.sglang.balance.client import SglangClient
from megatron_rl.rollout.sglang.process.options import ServerOptions
from megatron_rl.rollout.sglang.process.server import SglangServer
from megatron_rl.rollout.windows import WindowGenerator
from megatron_rl.system.http.json_http import HttpSession

BUDGET = 1 << 20
LOADED = "default"


class Programs(Environment):
    """Episodes whose programs run in the process of clients; each ends after its last answer."""

    opens = True

    def __init__(self, tokenizer: Tokenizer, num_turns: int) -> None:
        self.template, self.num_turns = ChatTemplate(tokenizer), num_turns
        self.endpoint = Endpoint(template=self.template)
        self.branches: asyncio.Queue[Branch] = asyncio.Queue()
        self.unwanted: set[str] = set()
        self.episodes: dict[str, Episode] = {}

    def add(self, name: str) -> str:
        """Add an episode; return its key."""
        limits = EpisodeLimits(BUDGET, BUDGET)
        self.episodes[name] = Episode(name, Conversation(self.template), limits, self.read_turn, self.branches, self.unwanted)
        return self.endpoint.add(self.episodes[name])

    async def read_turn(self, turn: Any, request: Any, answer_id: str, num_prompt_tokens: int) -> Any:
        stopped = turn.finish_reason == "stop"
        return await parse_turn(self.template, request, turn.token_ids, Parsers(), answer_id=answer_id, stopped=stopped)

    async def respond(self, prompt: Any, turns: Any, episode: str) -> Message | Ended:  # type: ignore[override]
        name = episode if episode in self.episodes else next(n for n, one in self.episodes.items() if one.row(episode))
        one = self.episodes[name]
        row = one.row(episode)
        assert row is not None
        reply = asyncio.ensure_future(one.next_message(row, turns))
        await asyncio.sleep(0)
        if len(turns) == self.num_turns:
            await asyncio.wait([reply], timeout=0.01)  # the last answer is delivered
            one.end(Ended(Score(1.0)))
        return await reply

    def graded_text(self, prompt: Any, turns: Any, index: int) -> str | None:
        return None

    def turn_reward(self, prompt: Any, turns: Any, index: int, grades: Any) -> Score | None:
        return None

    def outcome(self, prompt: Any, turns: Any, grades: Any) -> Score:
        return Score(0.0)


class Replies:
    """Stands in for the client and its servers: random tokens, one per ``forward_s``."""

    def __init__(self, tokenizer: Tokenizer, forward_s: float) -> None:
        self._random, self._forward_s = random.Random(1), forward_s
        self._ids = sorted({*range(tokenizer.vocab_size)} - {*tokenizer.special_ids})

    async def generate(self, request: Any, *, alone: bool = False) -> Generation:
        number = request.max_new_tokens
        await asyncio.sleep(number * self._forward_s)
        return Generation(np.array(self._random.choices(self._ids, k=number)), np.full(number, -1.0), "length", LOADED, 0)

    async def abort(self, rids: Any) -> None: ...


async def clients(url: str, keys: list[str], num_turns: int) -> None:
    """The process of clients: a conversation per key."""

    async def talk(number: int, key: str) -> None:
        history = [{"role": "user", "content": f"Task {number}: what is {number} times 17? Think about it first."}]
        for turn in range(num_turns):
            body = {"model": "policy", "messages": history}
            async with session.post(f"{url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}) as reply:
                assert reply.status == 200, await reply.text()
                message = (await reply.json())["choices"][0]["message"]
            history += [message, {"role": "user", "content": f"This is result {turn} of the tool. Go on, please."}]

    limits = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=limits[0], timeout=limits[1]) as session:
        await asyncio.gather(*(talk(number, key) for number, key in enumerate(keys)))


async def through_endpoint(client: Any, tokenizer: Tokenizer, options: argparse.Namespace, round: int) -> dict[str, Any]:
    """One round with programs; ``contexts`` are the tokens before each answer, by slot."""
    programs = Programs(tokenizer, options.turns)
    await programs.endpoint.start()
    size = dict(dialogue=True, max_turn_tokens=options.turn_tokens)
    rows = [Trajectory(i, Prompt(f"p{i}", (5,)), i, 0, BUDGET, **size) for i in range(options.programs)]
    keys = [programs.add(f"train-{i}") for i in range(options.programs)]
    process = start_self("--clients", json.dumps([programs.endpoint.url, keys, options.turns]))
    plan = GenerationPlan(sampling(tokenizer), tokenizer.decode, dialogue=make_dialogue(programs, tokenizer, chat=True))

    def open_row(first: Trajectory, token_ids: Any) -> Trajectory:
        rows.append(first.further_row(len(rows), token_ids))
        return rows[-1]

    while not any(one.num_requests for one in programs.episodes.values()):
        await asyncio.sleep(0.01)
    start = time.perf_counter(), time.process_time()
    window = WindowGenerator(client, None, plan, step=round, num_tokens=BUDGET, weight_version=LOADED, kind="train")
    await window.generate(list(rows), open_row=open_row)
    took = measured(start, sum(row.num_generated_tokens for row in rows))
    assert await asyncio.to_thread(process.wait, 60) == 0
    await programs.endpoint.close()
    contexts = [[row.token_ids[: len(row.prompt.token_ids) + turn.start] for turn in row.turns()] for row in rows]
    return {**took, "rows": len(rows), "requests": sum(one.num_requests for one in programs.episodes.values()), "contexts": contexts}


async def single_turns(client: Any, tokenizer: Tokenizer, options: argparse.Namespace, round: int, contexts: Any) -> dict[str, Any]:
    """One round without programs: each slot completes its contexts one after the other."""
    plan, num_tokens = GenerationPlan(sampling(tokenizer), tokenizer.decode), 0

    async def slot(number: int, prompts: Any) -> None:
        nonlocal num_tokens
        for turn, prompt in enumerate(prompts):
            row = Trajectory(1000 * number + turn, Prompt("p", tuple(prompt.tolist())), number, 0, options.turn_tokens)
            one = WindowGenerator(client, None, plan, step=round, num_tokens=BUDGET, weight_version=LOADED, kind="single")
            await one.generate([row])
            num_tokens += row.num_generated_tokens

    start = time.perf_counter(), time.process_time()
    await asyncio.gather(*(slot(number, prompts) for number, prompts in enumerate(contexts)))
    return measured(start, num_tokens)


def measured(start: tuple[float, float], num_tokens: int) -> dict[str, Any]:
    seconds, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
    return {"tokens": num_tokens, "seconds": seconds, "tokens_per_s": num_tokens / seconds, "cpu_s": cpu}


def sampling(tokenizer: Tokenizer) -> Sampling:
    return Sampling(temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=(tokenizer.eos_id,), seed=3)


async def waiting_tools(number: int) -> dict[str, float]:
    """The loop's lag and the threads while ``number`` tools wait."""
    process = start_self("--tool-server", stdout=subprocess.PIPE)
    assert process.stdout is not None
    url = (await asyncio.to_thread(process.stdout.readline)).strip()
    before, idle = threading.active_count(), await loop_lags()
    async with HttpSession() as session:
        tool = make_tool({"name": "t", "url": url}, session)
        waiting = [asyncio.create_task(call_tool({"t": tool}, "t", "{}", f"e/{i}", 120.0)) for i in range(number)]
        await asyncio.sleep(4.0)  # all calls are sent
        still, lags = sum(not one.done() for one in waiting), await loop_lags()
        threads = threading.active_count() - before
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    process.kill()
    return {"waiting": float(still), "threads": float(threads), **lags, **{f"without_tools_{name}": lag for name, lag in idle.items()}}


async def loop_lags() -> dict[str, float]:
    """Delays of a 5 ms sleep in milliseconds, by the clock and in CPU time of this process."""
    lags: dict[str, list[float]] = {"lag": [], "cpu_lag": []}
    for _ in range(400):
        clock_s, cpu_s = time.perf_counter(), time.process_time()
        await asyncio.sleep(0.005)
        lags["lag"].append(time.perf_counter() - clock_s - 0.005)
        lags["cpu_lag"].append(time.process_time() - cpu_s)
    return {f"{name}_p{p}_ms": 1e3 * sorted(found)[4 * p - 1] for name, found in lags.items() for p in (50, 99)}


async def tool_server() -> None:
    async def wait(_request: web.Request) -> web.Response:
        await asyncio.sleep(3600)
        return web.Response(text="late")

    app = web.Application()
    app.add_routes([web.post("/", wait)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=8192).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}/", flush=True)
    await asyncio.sleep(600)


def start_self(*arguments: str, **options: Any) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, __file__, "-", *arguments], text=True, **options)


async def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    tokenizer = Tokenizer(options.model)
    vocab_size = json.loads((Path(options.model) / "config.json").read_text())["vocab_size"]
    rounds = []
    async with AsyncExitStack() as stack:
        client: Any = Replies(tokenizer, options.forward_ms / 1e3)
        if url:
            client = await stack.enter_async_context(SglangClient([url], vocab_size=vocab_size, request_timeout_s=300))
            http = await stack.enter_async_context(HttpSession())
            await http.post(f"{url}/slow_down", {"forward_sleep_time": options.forward_ms / 1e3}, timeout_s=30)
        for round in range(options.repeats + 1):  # the first one warms up
            ours = await through_endpoint(client, tokenizer, options, round)
            plain = await single_turns(client, tokenizer, options, round, ours.pop("contexts"))
            extra_s = ours["cpu_s"] - plain["cpu_s"]
            rounds.append({
                "endpoint": ours, "single": plain, "ratio": ours["tokens_per_s"] / plain["tokens_per_s"],
                "endpoint_cpu_s_per_1000": 1e3 * extra_s / ours["requests"], "rows": ours["rows"] / options.programs,
            })  # fmt: skip
            print(json.dumps(rounds[-1]), flush=True)
    medians = {name: statistics.median(one[name] for one in rounds[1:]) for name in ("ratio", "endpoint_cpu_s_per_1000", "rows")}
    return {"medians": medians, "tools": await waiting_tools(options.tools), "rounds": rounds[1:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="folder of a model with a chat template")
    parser.add_argument("--programs", type=int, default=32)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--turn-tokens", type=int, default=64)
    parser.add_argument("--forward-ms", type=float, default=20.0)
    parser.add_argument("--no-server", action="store_true", help="random tokens instead of a server")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tools", type=int, default=2000)
    parser.add_argument("--json", default="", help="file for the raw numbers")
    parser.add_argument("--clients", default="", help=argparse.SUPPRESS)
    parser.add_argument("--tool-server", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.clients:
        asyncio.run(clients(*json.loads(options.clients)))
    elif options.tool_server:
        asyncio.run(tool_server())
    else:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            server = SglangServer(ServerOptions(options.model, deterministic=True), Path(folder) / "log", start_timeout_s=400.0)
            url = "" if options.no_server else stack.enter_context(server).url
            found = asyncio.run(measure(url, options))
        text = json.dumps(found, indent=1)
        if options.json:
            Path(options.json).write_text(text)
        print(json.dumps({name: found[name] for name in ("medians", "tools")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
