"""Laws of kept connections: every framing of an answer is read as aiohttp reads it, and a connection is used again only
where that is allowed."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.system.http import kept_http
from megatron_rl.system.http.json_http import HttpError, HttpSession, NoHttpReply
from megatron_rl.system.http.kept_http import KeptSession
from tests.unit.local_service import local_service

BODY = b'{"a": "' + bytes(range(48, 91)) * 40 + b'"}'
PARTS = [BODY[:100], BODY[100:101], BODY[101:]]
CHUNKS = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(part), part) for part in PARTS) + b"0\r\nTrailer: x\r\n\r\n"
FRAMED = {
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY),
    "chunks": b"HTTP/1.1 503 Service Unavailable\r\nTransfer-Encoding: chunked\r\nRetry-After: 7\r\n\r\n" + CHUNKS,
    "to the end": b"HTTP/1.0 200 OK\r\n\r\n" + BODY,
    "nothing": b"HTTP/1.1 204 No Content\r\n\r\n",
    "said before": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\nConnection: close\r\n\r\n{}",
}
BROKEN = {
    "no HTTP": (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", HttpError),
    "no status": (b"HTTP/1.1 abc\r\n\r\n", HttpError),
    "no length": (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", HttpError),
    "below nothing": (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", HttpError),
    "an endless head": (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000, HttpError),
    "too long": (b"HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n", HttpError),
    "too long in chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n99999999\r\n", HttpError),
    "cut": (FRAMED["length"][:-1], NoHttpReply),
    "cut in a chunk": (FRAMED["chunks"][:-30], NoHttpReply),
    "nobody": (b"", NoHttpReply),
}


def exchange(session, *answers, pieces=(), times=1):
    """What ``session`` makes of a server that gives ``answers`` on one connection after the other, cut into ``pieces``."""

    async def run():
        connections = []

        async def serve(reader, writer):
            connections.append(0)
            answer = answers[min(len(connections) - 1, len(answers) - 1)]
            try:
                while await reader.readuntil(b"\r\n\r\n"):
                    await reader.readexactly(2)  # the body
                    connections[-1] += 1
                    for start, end in zip((0, *pieces), (*pieces, len(answer)), strict=True):
                        writer.write(answer[start:end])
                        await asyncio.sleep(0)
                    if b"HTTP/1.1 " not in answer or b"close" in answer or answer in [bad for bad, _ in BROKEN.values()]:
                        break
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x?y=1"
        try:
            async with session as http:
                found = [await http.post(url, b"{}", timeout_s=10) for _ in range(times)]
        finally:
            server.close()
        return found, connections

    return asyncio.run(run())


@pytest.mark.parametrize("framing", FRAMED)
@settings(max_examples=10, deadline=None)
@given(st.randoms(use_true_random=False))
def test_answers_are_those_that_aiohttp_reads_however_they_are_cut(framing, rng):
    answer = FRAMED[framing]
    pieces = sorted(rng.sample(range(1, len(answer)), rng.randint(0, min(8, len(answer) - 1))))
    (expected,), _ = exchange(HttpSession(), answer)
    (found,), _ = exchange(KeptSession(max_answer_bytes=1 << 20), answer, pieces=pieces)
    assert found == expected


@pytest.mark.parametrize("fault", BROKEN)
def test_what_is_no_answer_is_told_as_by_aiohttp(fault):
    answer, kind = BROKEN[fault]
    with pytest.raises(HttpError) as error:
        exchange(KeptSession(max_answer_bytes=1 << 16), answer)
    assert isinstance(error.value, NoHttpReply) is (kind is NoHttpReply)


@pytest.mark.parametrize(
    ("framing", "connections"), [("length", [3]), ("chunks", [3]), ("to the end", [1, 1, 1]), ("said before", [1, 1, 1])]
)
def test_a_connection_is_used_again_where_the_server_allows_it(framing, connections):
    assert exchange(KeptSession(), FRAMED[framing], times=3)[1] == connections


def test_a_connection_that_was_idle_for_long_is_not_used_again(monkeypatch):
    monkeypatch.setattr(kept_http, "KEEPALIVE_S", 0.0)
    assert exchange(KeptSession(), FRAMED["length"], times=2)[1] == [1, 1]


def test_requests_at_the_same_time_have_connections_of_their_own():
    def answer(path, body):
        return {"body": body}

    async def ask(url):
        async with KeptSession() as http:
            jobs = [http.post(url, [i], timeout_s=10, headers={"Authorization": "Bearer x"}) for i in range(9)]
            return [found.json()["body"] for found in await asyncio.gather(*jobs)]

    with local_service(answer) as service:
        assert asyncio.run(ask(service.url)) == [[i] for i in range(9)]


def test_a_header_cannot_carry_a_second_one():
    async def ask():
        async with KeptSession() as http:
            await http.get("http://127.0.0.1:1/", timeout_s=1, headers={"Authorization": "Bearer x\r\nEvil: 1"})

    with pytest.raises(HttpError, match="end of a line"):
        asyncio.run(ask())


@pytest.mark.parametrize("url", ["https://h:1/", "http://u:p@h:1/", "http://h:1/a b", "ftp://h", "http://[::1", "x"])
def test_other_urls_go_the_usual_way(url):
    assert kept_http._target(url) is None
