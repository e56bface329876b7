"""A program that speaks to the endpoint in plain HTTP; the task says in which protocol, and what it does besides talking."""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

MODE = json.loads(Path("prompt.txt").read_text())
PROTOCOL = MODE["protocol"]
PATH = {"chat": "/chat/completions", "messages": "/messages", "responses": "/responses"}[PROTOCOL]
TOOL = {"name": "add", "description": "Adds numbers."}
SCHEMA = {"type": "object", "properties": {"numbers": {"type": "array"}}}


def post(history, *, count=0, timeout_s=120.0, **fields):
    body = {"model": "policy", "stream": bool(MODE["stream"]), **MODE.get("fields", {}), **fields}
    if PROTOCOL == "chat":
        body |= {"messages": history, "tools": [{"type": "function", "function": {**TOOL, "parameters": SCHEMA}}]}
    elif PROTOCOL == "messages":
        body |= {"messages": history, "max_tokens": body.get("max_tokens", 4000), "tools": [{**TOOL, "input_schema": SCHEMA}]}
    else:
        body |= {"input": history, "tools": [{"type": "function", **TOOL, "parameters": SCHEMA}]}
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    headers["x-stainless-retry-count"] = str(count)
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + PATH, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout_s) as reply:
        text = reply.read().decode()
    return streamed(text) if body["stream"] else json.loads(text)


def streamed(text):
    """The body that the events of a stream make."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ") and line != "data: [DONE]"]
    if PROTOCOL == "responses":
        return events[-1]["response"]
    if PROTOCOL == "chat":
        message, finish = {}, None
        for choice in (event["choices"][0] for event in events if event["choices"]):
            message |= {name: value for name, value in choice["delta"].items() if value is not None}
            finish = choice["finish_reason"] or finish
        return {"choices": [{"message": message, "finish_reason": finish}]}
    blocks, end = {}, {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = dict(event["content_block"])
        elif event["type"] == "content_block_delta":
            for name, value in event["delta"].items():
                if name != "type":
                    blocks[event["index"]][name] = blocks[event["index"]].get(name, "") + value
        elif event["type"] == "message_delta":
            end = event["delta"]
    return {"content": list(blocks.values()), **end}


def said(body):
    """The answer as entries of the next request's history."""
    if PROTOCOL == "chat":
        message = body["choices"][0]["message"]
        message = {**message, "content": message.get("content") or ""}
        return [message if MODE["thoughts"] else {name: value for name, value in message.items() if name != "reasoning_content"}]
    if PROTOCOL == "messages":
        return [{"role": "assistant", "content": [b for b in body["content"] if MODE["thoughts"] or b["type"] != "thinking"]}]
    return [item for item in body["output"] if MODE["thoughts"] or item["type"] != "reasoning"]


def user(text):
    return [{"role": "user", "content": text}]


def main():
    history = user(MODE["name"])
    if MODE.get("leave"):
        try:
            post(history, timeout_s=0.4)
            print("answered at once")
        except (TimeoutError, urllib.error.URLError):
            time.sleep(3.0)
            history = user("something else")
    previous = {}
    for turn in range(MODE.get("turns", 6)):
        if MODE.get("retry") and turn % 2:
            try:
                post(history, timeout_s=0.05)
                print("answered at once")
            except (TimeoutError, urllib.error.URLError):
                print("retried")
        answer = post(history, count=int(bool(MODE.get("retry"))), **previous)
        if MODE.get("fork") and turn == 2:
            post(user("a part of the task"))
            post([*history[:-1], *user("another way")])
        history = [*history, *said(answer), *user(f"more {turn}")]
        if MODE.get("chain"):
            previous, history = {"previous_response_id": answer["id"]}, user(f"more {turn}")
    Path("result.txt").write_text(f"{turn + 1} turns")
    print("done")


if __name__ == "__main__":
    sys.exit(main())
