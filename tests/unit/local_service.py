"""A small HTTP server on this machine for tests of rewards that ask one; it runs in a thread and counts what it gets."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Handler = Callable[[str, Any], Any]
"""(path, JSON body) to a JSON answer, a web.Response, or seconds to sleep as ``Sleep``."""


@dataclass(frozen=True)
class Sleep:
    seconds: float


@dataclass
class Service:
    url: str = ""
    requests: list[tuple[str, Any]] = field(default_factory=list)
    most_in_progress: int = 0


@contextmanager
def local_service(handler: Handler) -> Iterator[Service]:
    """A server on a free port that answers every POST and GET by ``handler``."""
    service = Service()
    loop = asyncio.new_event_loop()
    in_progress = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal in_progress
        in_progress += 1
        service.most_in_progress = max(service.most_in_progress, in_progress)
        try:
            text = await request.text()
            body = json.loads(text) if text else None
            service.requests.append((request.path, body))
            found = handler(request.path, body)
            if isinstance(found, Sleep):
                await asyncio.sleep(found.seconds)
                found = {"score": 1.0}
            return found if isinstance(found, web.StreamResponse) else web.json_response(found)
        finally:
            in_progress -= 1

    async def start() -> web.AppRunner:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        service.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    async def stop(runner: web.AppRunner) -> None:
        await runner.cleanup()
        sleepers = asyncio.all_tasks() - {asyncio.current_task()}
        for task in sleepers:
            task.cancel()
        await asyncio.gather(*sleepers, return_exceptions=True)

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runner = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield service
    finally:
        asyncio.run_coroutine_threadsafe(stop(runner), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
