"""Tools that wait: deadlines, keys, failures, MCP; and the environment that gives their results to the model."""

import asyncio
import json
import sys
import time
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from megatron_rl.agents.tools import MAX_RESULT_CHARACTERS, McpServer, ToolUnavailable, call_tool, make_tool
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import Prompt
from megatron_rl.environments import base
from megatron_rl.environments.base import Ended, EnvironmentFault, TurnView
from megatron_rl.system.http.json_http import HttpSession
from tests.chat_models import END_ID, called
from tests.unit.agents.fake_run import FakeRun, services, website

MCP = """
import json, os, sys, time
for line in sys.stdin:
    message = json.loads(line)
    method, number = message["method"], message.get("id")
    if method == "initialize":
        result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "s", "version": "1"}}
    elif method == "tools/list":
        schema = {"type": "object", "properties": {"text": {"type": "string"}}}
        names = ["shout"] if message["params"].get("cursor") else ["fail", "die", "hang"]
        result = {"tools": [{"name": name, "description": name, "inputSchema": schema} for name in names]}
        if names != ["shout"]:
            result["nextCursor"] = "2"
    elif method == "tools/call":
        name, text = message["params"]["name"], message["params"]["arguments"].get("text", "")
        if name == "die":
            os._exit(1)
        if name == "hang":
            continue
        key = message["params"]["_meta"]["megatron_rl/key"]
        result = {"content": [{"type": "text", "text": text.upper() + " " + key}], "isError": name == "fail"}
    else:
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": number, "result": result}), flush=True)
"""


def run(main: Any) -> Any:
    return asyncio.run(asyncio.wait_for(main, 40))


async def call(tool: Any, arguments: dict[str, Any], timeout_s: float = 20.0) -> str:
    return await call_tool({"t": tool}, "t", json.dumps(arguments), "train-0/1/0", timeout_s)


def command_tool(text: str) -> Any:
    return make_tool({"name": "t", "command": [sys.executable, "-c", text]}, HttpSession())


def test_an_http_tool_gets_arguments_and_key_and_is_asked_again_under_the_same_key():
    async def main():
        async with website() as site:
            tool = make_tool({"name": "t", "url": site.url + "/sum"}, site.session)
            assert await call(tool, {"numbers": [1, 2]}) == "sum 3"
            site.state.failures = 2
            assert await call(tool, {"numbers": [3]}) == "sum 3"
            assert sorted(key for key, _ in site.seen) == ["train-0/1/0"] * 4
            assert (await call(tool, {})).startswith("error: HTTP 422: numbers?")
            site.state.delay_s = 30
            start = time.monotonic()
            assert await call(tool, {"numbers": []}, 0.3) == "error: no result within 0.3 s" and time.monotonic() - start < 5
            assert "there is no tool 'u'; the tools: t" in await call_tool({"t": tool}, "u", "{}", "k", 1.0)

    run(main())


def test_a_tool_that_cannot_be_reached_is_no_result(monkeypatch):
    monkeypatch.setattr("megatron_rl.agents.tools._FIRST_PAUSE_S", 0.01)

    async def main():
        async with HttpSession() as session:
            with pytest.raises(ToolUnavailable):
                await call(make_tool({"name": "t", "url": "http://127.0.0.1:1/"}, session), {}, 60.0)
        with pytest.raises(ToolUnavailable):
            await call(make_tool({"name": "t", "command": ["no-such-command"]}, HttpSession()), {})

    run(main())


def test_a_command_tool_reads_arguments_and_writes_the_result():
    async def main():
        echo = command_tool("import json, os, sys; print(json.load(sys.stdin)['a'] * 2, os.environ['TOOL_CALL_KEY'])")
        assert await call(echo, {"a": "x"}) == "xx train-0/1/0\n"
        assert (await call(command_tool("print('why'); raise SystemExit(3)"), {})).startswith("error: exit code 3: why")
        long = await call(command_tool("print('x' * 1_000_000)"), {})
        assert MAX_RESULT_CHARACTERS < len(long) < MAX_RESULT_CHARACTERS + 100

    run(main())


def test_a_call_beyond_its_deadline_leaves_no_process(tmp_path):
    async def main():
        text = f"import os, time\nif os.fork() == 0: os.chdir({str(tmp_path)!r})\ntime.sleep(30)"
        assert await call(command_tool(text), {}, 1.0) == "error: no result within 1 s"

    run(main())
    deadline_s = time.monotonic() + 10  # a killed process is there for a moment
    while found := [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)]:
        assert time.monotonic() < deadline_s, found
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "t"}, "url or command"),
        ({"url": "x"}, "name"),
        ({"name": "t", "url": "x", "command": ["y"]}, "either"),
        ({"name": "t", "command": "ls -l"}, "list of words"),
        ({"name": "t", "url": "x", "urls": "y"}, "urls"),
        ({"mcp_url": "x", "name": "t"}, "alone"),
        ({"mcp_command": "server.py"}, "list of words"),
    ],
)
def test_tools_of_a_recipe_are_checked(fields, message):
    with pytest.raises(EnvironmentFault, match=message):
        base.build("tools", {"tools": [fields], "tool_parser": "qwen25"})


def test_an_mcp_server_over_a_process(tmp_path):
    (tmp_path / "server.py").write_text(MCP)

    async def main():
        server = McpServer(command=[sys.executable, str(tmp_path / "server.py")])
        tools = {tool.description["function"]["name"]: tool for tool in await server.tools()}
        assert list(tools) == ["fail", "die", "hang", "shout"]
        many = await asyncio.gather(*(call_tool(tools, "shout", json.dumps({"text": f"a{i}"}), f"k{i}", 20) for i in range(20)))
        assert many == [f"A{i} k{i}" for i in range(20)]
        assert await call_tool(tools, "fail", '{"text": "x"}', "k", 20) == "error: X k"
        assert "no result within" in await call_tool(tools, "hang", "{}", "k", 0.2)
        with pytest.raises(ToolUnavailable, match="process ended"):
            await call_tool(tools, "die", "{}", "k", 20)
        assert await call_tool(tools, "shout", '{"text": "again"}', "k", 20) == "AGAIN k"
        await server.close()

    run(main())


def test_an_mcp_server_over_http():
    async def main():
        async with website() as site:
            server = McpServer(url=site.url + "/mcp")
            (tool,) = await server.tools()
            assert await call(tool, {}) == "seen"
            await server.close()
            assert site.seen == [(None, "initialize"), ("s1", "notifications/initialized"), ("s1", "tools/list"), ("s1", "tools/call")]

    run(main())


@asynccontextmanager
async def environment(tokenizer: Tokenizer, folder: Any, **options: Any):
    async with website() as site:
        tools = [{"name": "sum", "description": "adds", "url": site.url + "/sum"}]
        made = base.build("tools", {"tools": tools, "tool_parser": "qwen25", **options})
        await made.start(services(folder, tokenizer, server_urls=lambda: [site.url]))
        fake = FakeRun(made, tokenizer, END_ID)
        yield site, fake
        await made.close()


PROMPT = Prompt("p", (5,), text="the task", answer="42")


def test_a_dialogue_with_tools_reads_as_the_templates_own_rendering(tokenizer, tmp_path):
    async def main():
        async with environment(tokenizer, tmp_path, system_prompt="Add.") as (site, fake):
            turns = ["let me see " + called("sum", numbers=[1, 2]) + called("sum", numbers=[5]), called("sum", numbers=[4, 4]), "it is 11"]
            fake.answer = lambda text, number: turns[number]
            end = await fake.episode("train-0", PROMPT)
            assert end == Ended(graded_text="it is 11")
            assert sorted(key for key, _ in site.seen) == ["train-0/1/0", "train-0/1/1", "train-0/2/0"]
            row = fake.rows["train-0"]
            calls = [[("sum", {"numbers": [1, 2]}), ("sum", {"numbers": [5]})], [("sum", {"numbers": [4, 4]})]]
            messages: list[dict[str, Any]] = [{"role": "system", "content": "Add."}, {"role": "user", "content": "the task"}]
            for text, made, results in [("let me see ", calls[0], ["sum 3", "sum 5"]), ("", calls[1], ["sum 8"])]:
                functions = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in made]
                messages.append({"role": "assistant", "content": text, "tool_calls": functions})
                messages += [{"role": "tool", "content": result} for result in results]
            tools = [tool.description for tool in fake.environment._tools.values()]
            whole = tokenizer.encode_prompt(messages, chat=True, arguments={"tools": tools})
            assert row.ids[: len(whole)] == whole
            assert fake.environment.metrics(PROMPT, [], {}) == {"num_turns": 0.0, "num_calls": 0.0}

    run(main())


def test_a_resumed_dialogue_repeats_the_newest_calls_under_the_same_keys(tokenizer, tmp_path):
    async def main():
        async with environment(tokenizer, tmp_path) as (site, fake):
            fake.answer = lambda text, number: called("sum", numbers=[number]) if number < 2 else "done"
            await fake.episode("train-0", PROMPT)
            row, before = fake.rows["train-0"], list(site.seen)
        async with environment(tokenizer, tmp_path) as (site, fake):  # another process knows the prompt and the turns only
            views = [TurnView("policy", "", tuple(row.ids[a : a + n]), "stop") for a, n in row.spans[:2]]
            reply = await fake.environment.respond(PROMPT, views, episode="train-0")
            end, start = row.spans[1][0] + row.spans[1][1], row.spans[2][0]
            assert list(reply.token_ids) == row.ids[end:start]
            assert site.seen == before[1:]

    run(main())


def test_a_tool_that_cannot_be_reached_leaves_the_dialogue_unscored(tokenizer, tmp_path):
    async def main():
        async with environment(tokenizer, tmp_path) as (_, fake):
            fake.environment._tools["sum"] = make_tool({"name": "sum", "command": ["no-such-command"]}, HttpSession())
            fake.answer = lambda text, number: called("sum", numbers=[1])
            end = await fake.episode("train-0", PROMPT)
            assert end.score.value is None and "no-such-command" in end.score.error

    run(main())


def test_calls_above_the_limits_are_errors_for_the_model_and_the_last_turn_is_the_answer(tokenizer, tmp_path):
    async def main():
        async with environment(tokenizer, tmp_path, max_turns=2, max_calls_per_turn=1) as (site, fake):
            fake.answer = lambda text, number: called("sum", numbers=[1]) * 3
            end = await fake.episode("train-0", PROMPT)
            assert isinstance(end.graded_text, str) and len(site.seen) == 1
            assert tokenizer.decode(fake.rows["train-0"].ids).count("error: more than 1 calls in one answer") == 2

    run(main())


def test_two_thousand_waiting_tools_do_not_hold_up_the_event_loop(tokenizer, tmp_path):
    async def main():
        async with website() as site:
            site.state.delay_s = 3.0
            tool = make_tool({"name": "t", "url": site.url + "/sum"}, site.session)
            waiting = [asyncio.create_task(call(tool, {"numbers": [i]}, 60.0)) for i in range(2000)]
            while len(site.seen) < 2000:
                await asyncio.sleep(0.05)
            lags = []
            for _ in range(100):
                start = time.monotonic()
                await asyncio.sleep(0.005)
                lags.append(time.monotonic() - start - 0.005)
            assert sorted(await asyncio.gather(*waiting)) == sorted(f"sum {i}" for i in range(2000))
            print(f"lag p99 {1e3 * sorted(lags)[98]:.1f} ms")
            assert sorted(lags)[50] < 0.02

    run(main())
