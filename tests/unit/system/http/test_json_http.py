"""Laws of HTTP sessions: replies, and the two errors."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from aiohttp import web

from megatron_rl.system.http.json_http import (
    HttpError,
    HttpReply,
    HttpSession,
    HttpThread,
    NoHttpReply,
    backoff_s,
    get_once,
)
from tests.unit.local_service import Service, Sleep, local_service

Ask = Callable[..., HttpReply]


def _handler(path: str, body: object) -> object:
    if path == "/slow":
        return Sleep(30)
    if path == "/moved":
        return web.Response(status=302, headers={"Location": "/echo"})
    if path == "/busy":
        return web.Response(status=503, text="later")
    if path == "/long":
        return web.Response(text="x" * 5000)
    return {"body": body}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with local_service(_handler) as running:
        yield running


def _closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def ask() -> Ask:
    def ask(url: str, body: object = None, *, timeout_s: float | None = 10.0, **options: object) -> HttpReply:
        async def post() -> HttpReply:
            async with HttpSession(**options) as http:
                return await http.post(url, body, timeout_s=timeout_s)

        return asyncio.run(post())

    return ask


def test_bodies_are_json_and_bytes_are_json_already(service: Service, ask: Ask) -> None:
    assert ask(f"{service.url}/echo", {"a": [1, "\ud800"]}).json() == {"body": {"a": [1, "\ud800"]}}
    assert ask(f"{service.url}/echo", json.dumps([2]).encode()).json() == {"body": [2]}


@pytest.mark.parametrize(("path", "status"), [("/busy", 503), ("/moved", 302)])
def test_every_status_is_an_answer_and_redirects_are_not_followed(service: Service, ask: Ask, path: str, status: int) -> None:
    assert ask(service.url + path).status == status


def test_a_deadline_that_passes_is_told_from_a_server_that_is_not_there(service: Service, ask: Ask) -> None:
    with pytest.raises(NoHttpReply) as late:
        ask(f"{service.url}/slow", timeout_s=0.2)
    with pytest.raises(NoHttpReply, match="ClientConnectorError") as absent:
        ask(f"http://127.0.0.1:{_closed_port()}/")
    assert late.value.timed_out and not absent.value.timed_out


def test_errors_that_a_retry_cannot_fix_are_not_no_http_reply(service: Service, ask: Ask) -> None:
    for url, options, words in (
        ("not a url", {}, "InvalidURL|InvalidUrl"),
        (f"{service.url}/long", {"max_answer_bytes": 4999}, "longer than 4999 bytes"),
    ):
        with pytest.raises(HttpError, match=words) as error:
            ask(url, **options)
        assert not isinstance(error.value, NoHttpReply)
    assert len(ask(f"{service.url}/long", max_answer_bytes=5000).content) == 5000


def test_threads_without_an_event_loop_send_requests(service: Service) -> None:
    assert get_once(f"{service.url}/echo", timeout_s=10).status == 200
    with HttpThread() as http:
        futures = [http.submit(http.session.post(f"{service.url}/echo", i, timeout_s=10)) for i in range(20)]
        assert [future.result(10).json()["body"] for future in futures] == list(range(20))
        assert http.request("GET", f"{service.url}/busy", timeout_s=10).text == "later"


def test_close_cancels_requests_in_progress_immediately(service: Service) -> None:
    before = threading.active_count()
    http = HttpThread()
    future = http.submit(http.session.get(f"{service.url}/slow", timeout_s=30))
    time.sleep(0.1)
    started_at = time.monotonic()
    http.close()
    assert future.cancelled() and time.monotonic() - started_at < 5
    assert threading.active_count() == before


def test_pauses_grow_and_jitter_stays_in_its_bounds() -> None:
    assert list(backoff_s(3, 0.5)) == [0.5, 1.0, 2.0]
    for pause_s, middle_s in zip(backoff_s(20, 1.0, jitter=0.5), backoff_s(20, 1.0), strict=True):
        assert 0.5 * middle_s <= pause_s <= 1.5 * middle_s
