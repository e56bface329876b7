"""One episode of an openenv-core 0.3.0 environment, over its WebSocket: the policy guesses until it is right, or may no more."""

import asyncio
import json
import os
import re
from pathlib import Path

import openai
from openenv.core import GenericEnvClient


async def main() -> None:
    policy, row = openai.AsyncOpenAI(), json.loads(Path("row.json").read_text())
    async with GenericEnvClient(base_url=os.environ["OPENENV_URL"]) as environment:
        result = await environment.reset(seed=row["seed"])
        messages: list = [{"role": "user", "content": result.observation["text"]}]
        while not result.done:
            answer = (await policy.chat.completions.create(model="policy", messages=messages)).choices[0].message
            digits = re.findall(r"[1-9]", answer.content or "")
            result = await environment.step({"number": int(digits[-1]) if digits else 0})
            messages += [answer, {"role": "user", "content": result.observation["text"]}]
    Path("result.txt").write_text(str(result.reward or 0.0))


asyncio.run(main())
