"""Official clients, unmodified, against the endpoint: each in an environment of its own, because their pins clash.

``MEGATRON_RL_CLIENTS`` is a folder with the environments; ``python -m tests.integration.test_agent_clients FOLDER`` makes them (0.7 GB).
Windows are played: what a client makes of an answer does not depend on the model.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.agents.harness import EndpointOptions, Harness
from megatron_rl.agents.program import AgentLimits
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import Prompt
from tests.chat_models import END_ID, called, write_tokenizer
from tests.unit.agents.fake_run import FakeRun, services, website

CLIENTS = {
    "sdk": ["openai==3.54.0", "anthropic==2.12.0"],
    "agents": ["openai-agents==0.24.0"],
    "mini": ["mini-swe-agent==2.4.6"],
    "adapters": ["verifiers==0.4.0", "openenv-core==0.3.0", "uv"],
}
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "agents"
FOLDER = os.environ.get("MEGATRON_RL_CLIENTS", "")
TOOL = '{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"numbers": {"type": "array"}}}}}'

OPENAI_CHAT = f"""
import json, openai
client, tools = openai.OpenAI(), [json.loads('{TOOL}')]
messages = [{{"role": "user", "content": "add"}}]
for turn in range(4):
    if turn == 2:
        with client.chat.completions.stream(model="m", messages=messages, tools=tools) as stream:
            answer = stream.get_final_completion().choices[0].message
    else:
        answer = client.chat.completions.create(model="m", messages=messages, tools=tools).choices[0].message
    messages.append(answer if turn != 1 else answer.model_dump())
    for call in answer.tool_calls or []:
        messages.append({{"role": "tool", "tool_call_id": call.id, "content": str(sum(json.loads(call.function.arguments)["numbers"]))}})
open("result.txt", "w").write(answer.content)
"""
OPENAI_RESPONSES = """
import json, openai
client = openai.OpenAI()
tools = [{"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}]
items = [{"role": "user", "content": "add"}]
for turn in range(4):
    if turn == 2:
        with client.responses.stream(model="m", input=items, tools=tools) as stream:
            answer = stream.get_final_response()
    else:
        answer = client.responses.create(model="m", input=items, tools=tools)
    items += answer.output
    for call in answer.output:
        if call.type == "function_call":
            total = sum(json.loads(call.arguments)["numbers"])
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": str(total)})
open("result.txt", "w").write(answer.output_text)
"""
ANTHROPIC = """
import anthropic
client = anthropic.Anthropic()
tools = [{"name": "add", "input_schema": {"type": "object", "properties": {}}}]
messages = [{"role": "user", "content": "add"}]
assert client.messages.count_tokens(model="m", messages=messages, tools=tools).input_tokens > 10
for turn in range(4):
    if turn == 2:
        with client.messages.stream(model="m", max_tokens=99, messages=messages, tools=tools) as stream:
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(model="m", max_tokens=99, messages=messages, tools=tools)
    messages.append({"role": "assistant", "content": answer.content})
    calls = [b for b in answer.content if b.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": b.id, "content": str(sum(b.input["numbers"]))} for b in calls]
    if results:
        messages.append({"role": "user", "content": results})
open("result.txt", "w").write(answer.content[-1].text)
"""
AGENTS = """
import asyncio, sys
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from openai import AsyncOpenAI
@function_tool
def add(numbers: list[int]) -> str:
    return str(sum(numbers))
kind = OpenAIChatCompletionsModel if sys.argv[1] == "chat" else OpenAIResponsesModel
agent = Agent(name="a", instructions="Add.", tools=[add], model=kind(model="m", openai_client=AsyncOpenAI()))
async def main():
    if sys.argv[2] == "streamed":
        result = Runner.run_streamed(agent, "add")
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, "add")
    open("result.txt", "w").write(str(result.final_output))
asyncio.run(main())
"""
MINI = """
import os
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
model = LitellmModel(model_name="openai/m", model_kwargs={"api_base": os.environ["OPENAI_BASE_URL"]}, cost_tracking="ignore_errors")
agent = DefaultAgent(model, LocalEnvironment(), system_template="Work.", instance_template="{{task}}", step_limit=6, cost_limit=0)
done = agent.run("add")
open("result.txt", "w").write(done["submission"] if isinstance(done, dict) else done[1])
"""


def adds(text: str, turn: int) -> str:
    """Three turns with calls, then the answer."""
    return "so " + called("add", numbers=[turn, 1]) if turn < 3 else "the sum is 4"


def submits() -> Callable[[str, int], str]:
    """A command, an answer without a call, which mini-swe-agent leaves out, and the end, in whichever row."""
    finish = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo four"
    texts = iter([called("bash", command="echo hi"), "no call"])
    return lambda text, turn: next(texts, called("bash", command=finish))


def python_of(client: str) -> str:
    path = Path(FOLDER) / client / "bin" / "python"
    if not FOLDER or not path.exists():
        pytest.skip(f"MEGATRON_RL_CLIENTS names no folder with the environment {client!r}; see the docstring of this file")
    return str(path)


def train(tmp_path: Path, client: str, agent: str | Path, answer: Callable[[str, int], str], *arguments: str, **options: Any):
    """The end of one episode, and the run with its rows."""
    python = python_of(client)
    write_tokenizer(tmp_path / "model")
    if isinstance(agent, str):
        (tmp_path / "agent.py").write_text(agent)
    tokenizer = Tokenizer(tmp_path / "model")

    async def main() -> tuple[Any, FakeRun]:
        async with website() as site:
            harness = Harness(
                command=[python, str(tmp_path / "agent.py" if isinstance(agent, str) else agent), *arguments],
                endpoint=EndpointOptions(tool_parser="qwen25"),
                **{
                    "variables": {"MSWEA_CONFIGURED": "1", "MSWEA_SILENT_STARTUP": "1", "MSWEA_GLOBAL_CONFIG_DIR": "{workspace}"},
                    "program": AgentLimits(readable=[FOLDER], time_limit_s=240),
                    **options,
                },
            )
            limits = dict(max_prompt_tokens=6000, max_response_tokens=6000)
            await harness.start(services(tmp_path, tokenizer, server_urls=lambda: [site.url], **limits))
            run = FakeRun(harness, tokenizer, END_ID)
            run.answer = answer
            opening = asyncio.create_task(run.open_branches())
            ended = await run.episode("train-0", Prompt("p", (5,), text="add", fields={"seed": 4, "sum": 4}))
            await asyncio.sleep(0.5)
            opening.cancel()
            await harness.close()
            return ended, run

    ended, run = asyncio.run(asyncio.wait_for(main(), 280))
    assert ended.score is None, (ended.score.error, (tmp_path / "agents" / "train-0" / "output.txt").read_text()[-3000:])
    return ended, run


@pytest.mark.timeout(300)
@pytest.mark.parametrize("program", [OPENAI_CHAT, OPENAI_RESPONSES, ANTHROPIC], ids=["openai chat", "openai responses", "anthropic"])
def test_the_official_clients_hold_one_conversation_in_one_row(tmp_path, program):
    ended, run = train(tmp_path, "sdk", program, adds)
    assert ended.graded_text == "the sum is 4" and len(run.rows) == 1 and len(run.rows["train-0"].spans) == 4


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["whole", "streamed"])
@pytest.mark.parametrize("protocol", ["chat", "responses"])
def test_openai_agents_holds_one_conversation_in_one_row(tmp_path, protocol, mode):
    ended, run = train(tmp_path, "agents", AGENTS, adds, protocol, mode)
    assert ended.graded_text == "the sum is 4" and len(run.rows) == 1 and len(run.rows["train-0"].spans) == 4


@pytest.mark.timeout(300)
def test_mini_swe_agent_forks_only_where_it_leaves_out_an_answer(tmp_path):
    ended, run = train(tmp_path, "mini", MINI, submits())
    assert ended.graded_text.strip() == "four" and len(run.rows) == 2


@pytest.mark.timeout(300)
def test_a_verifiers_task_set_runs_beside_and_its_reward_is_the_result(tmp_path):
    # For the packages that verifiers installs when it starts.
    index = {name: value for name, value in os.environ.items() if name.startswith(("UV_", "PIP_")) or "proxy" in name.lower()}
    variables = {**index, "UV_CACHE_DIR": str(tmp_path / "uv")}
    options = dict(fields=["sum"], program=AgentLimits(sandbox="none", time_limit_s=240), variables=variables)
    ended, run = train(tmp_path, "adapters", EXAMPLES / "verifiers_agent.py", lambda text, turn: "the sum is 4", **options)
    assert ended.graded_text == "1.0" and len(run.rows) == 1


@pytest.mark.timeout(300)
def test_an_openenv_environment_answers_by_its_websocket(tmp_path):
    port = free_port()
    server = subprocess.Popen([python_of("adapters"), str(EXAMPLES / "openenv_server.py"), str(port)])
    try:
        wait_for_port(port)
        options = dict(
            fields=["seed"],
            program=AgentLimits(readable=[FOLDER], time_limit_s=240, ports=[port]),
            variables={"OPENENV_URL": f"http://127.0.0.1:{port}"},
        )
        guesses = ["3", "I say 7", "5"]  # the number is 1 + seed
        ended, run = train(tmp_path, "adapters", EXAMPLES / "openenv_agent.py", lambda text, turn: guesses[turn], **options)
        assert ended.graded_text == "1.0" and len(run.rows["train-0"].spans) == 3
    finally:
        server.kill()
        server.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.2)
    raise AssertionError(f"nothing listens on port {port}")


if __name__ == "__main__":
    for name, packages in CLIENTS.items():
        subprocess.run([sys.executable, "-m", "venv", f"{sys.argv[1]}/{name}"], check=True)
        subprocess.run([f"{sys.argv[1]}/{name}/bin/python", "-m", "pip", "install", "-q", *packages], check=True)
