"""The agent: an ordinary loop around OpenAI's client, as a service that solves many tasks at a time.

    python examples/agents/repair/agent_service.py 8775

A task comes as JSON (``base_url`` and ``key`` of the policy, ``prompt``, ``files``); the reply is the repository's files after the
agent has said that it is done. Files are here, and not in the conversation: what the policy says cannot change them but by ``edit``.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

import openai
from aiohttp import web
from repository import Repository

MAX_TURNS = 8
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": {"type": "object", "properties": properties}}}
    for name, text, properties in (
        ("read", "Shows the lines of a file", {"file": {"type": "string"}}),
        ("edit", "Replaces a line", {"file": {"type": "string"}, "line": {"type": "integer"}, "text": {"type": "string"}}),
        ("run", "Runs the check", {}),
    )
]


async def solve(client: openai.AsyncOpenAI, prompt: str, files: Mapping[str, list[str]]) -> Repository:
    """Let the policy work until it answers without a tool call."""
    repository, messages = Repository(files), list[Any]([{"role": "user", "content": prompt}])
    for _ in range(MAX_TURNS):
        answer = (await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)).choices[0].message
        if not answer.tool_calls:
            break
        messages.append(answer)
        for call in answer.tool_calls:
            result = repository.call(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return repository


def service() -> web.Application:
    # One client, and so one pool of connections, for all tasks; each has its own key.
    shared = openai.AsyncOpenAI(api_key="of the task", base_url="http://127.0.0.1")

    async def handle(http: web.Request) -> web.Response:
        task = await http.json()
        client = shared.with_options(api_key=task["key"], base_url=task["base_url"])
        repository = await solve(client, task["prompt"], json.loads(task["files"]))
        return web.json_response(repository.files)

    app = web.Application()
    app.add_routes([web.post("/", handle)])
    return app


if __name__ == "__main__":
    # A task whose episode the run has stopped ends with its connection.
    web.run_app(service(), host="127.0.0.1", port=int(sys.argv[1]), handler_cancellation=True, print=None)
