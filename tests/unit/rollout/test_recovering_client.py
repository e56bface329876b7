"""Laws of server recovery: no caller waits forever, and no server serves before it has the current weights."""

import asyncio
import contextlib
import gc
import threading
import time
from pathlib import Path

import pytest
from aiohttp import web

from megatron_rl.config.schema import RolloutConfig
from megatron_rl.errors import UserError
from megatron_rl.rollout import recovering_client
from megatron_rl.rollout.recovering_client import RecoveringClient
from megatron_rl.rollout.requests import ServerError, ServerLost
from megatron_rl.rollout.server_pool import ServerPool
from megatron_rl.rollout.sglang.wire.response_validation import InvalidReply
from megatron_rl.system.http.url_files import named_urls
from tests.unit.rollout.sglang.balance.kv_server import KvServer
from tests.unit.rollout.sglang.balance.test_client import FakeServer, request_of


class Restartable:
    """Stands in for a server process; ``restart`` starts ``fake`` again on its port."""

    incarnation = 1
    is_ours = True

    def __init__(self, url, fake, *, fails=False):
        self.url, self.fake, self.fails, self.num_restarts = url, fake, fails, 0

    def restart(self, while_waiting=lambda: None):
        self.num_restarts += 1
        if self.fails:
            raise ServerError("it died again")
        self.fake.healthy, self.fake.probe_s, self.fake.handler = True, 0.0, None


    def abandon(self):
        pass


def run(scenario, num_servers=1, **options):
    """Run ``scenario(client, fakes)`` with servers that reply 500 and are unhealthy until they are restarted."""
    fails, kind, known = options.pop("fails", False), options.pop("kind", Restartable), options.pop("known", [])

    async def broken(body):
        return web.Response(status=500)

    async def main():
        fakes = [FakeServer(broken) for _ in range(num_servers)]
        servers = [kind(await fake.start(), fake, fails=fails) for fake in fakes]
        known.extend(servers)
        for fake in fakes:
            fake.healthy, fake.probe_s = False, None
        warnings = []
        try:
            async with RecoveringClient(
                RolloutConfig(max_retries=1), ServerPool(servers), vocab_size=100, warn=warnings.append, **options
            ) as client:
                return await asyncio.wait_for(scenario(client, fakes), 20), servers, warnings
        finally:
            for fake in fakes:
                await fake.stop()

    return asyncio.run(main())


def test_request_waits_until_a_lost_server_recovers():
    answers, (server,), warnings = run(
        lambda client, fakes: asyncio.gather(*[client.generate(request_of(f"r{i}")) for i in range(3)])
    )
    assert [answer.token_ids for answer in answers] == [(7,)] * 3
    assert server.num_restarts == 1
    assert "is lost" in warnings[0] and "serves again, with the weights of its model folder" in warnings[-1]


def test_restarted_server_serves_only_after_readmission():
    served = []

    async def readmit(url):
        await asyncio.sleep(0.05)
        served.append(url)
        return "weight version 3"

    async def scenario(client, fakes):
        answer = await client.generate(request_of())
        assert served == client.client.live_urls
        return answer, client.num_restarts

    (_, num_restarts), (server,), warnings = run(scenario, readmit=readmit)
    assert served == [server.url] and num_restarts == 1 and warnings[-1].endswith("with weight version 3")


def test_recovery_raises_the_last_error_when_no_server_is_left():
    async def scenario(client, fakes):
        for _ in range(2):
            with pytest.raises(ServerError, match="died again"):
                await client.generate(request_of())

    run(scenario, fails=True)


def test_running_server_that_keeps_failing_is_not_awaited():
    async def scenario(client, fakes):
        fakes[0].healthy = True
        with pytest.raises(ServerLost, match="500"):
            await client.generate(request_of())

    _, (server,), _ = run(scenario)
    assert server.num_restarts == 0


class Attached(Restartable):
    """Attached server: ``restart`` fails immediately unless ``back`` is set."""

    is_ours = False
    back = False

    def restart(self, while_waiting=lambda: None):
        self.num_restarts += 1
        if not self.back:
            time.sleep(0.02)
            raise ServerError("it did not come back")
        self.fake.healthy, self.fake.probe_s, self.fake.handler = True, 0.0, None


def test_removed_server_is_reported_with_the_number_remaining(caplog):
    async def scenario(client, fakes):
        fakes[1].healthy, fakes[1].probe_s, fakes[1].handler = True, 0.0, None
        answers = [await client.generate(request_of(f"r{i}")) for i in range(4)]
        while not client._recoveries or not all(task.done() for task in client._recoveries.values()):
            await asyncio.sleep(0.01)
        return answers, client.num_live, client.restarting

    (answers, num_live, restarting), servers, warnings = run(scenario, num_servers=2, fails=True)
    assert [answer.token_ids for answer in answers] == [(7,)] * 4
    assert num_live == 1 and restarting == {servers[0].url}
    (removed,) = [text for text in warnings if "removed" in text]
    assert f"removed SGLang server {servers[0].url}: it died again 1 of 2 servers remain." in removed
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_removed_attached_server_rejoins_when_it_recovers():
    async def scenario(client, fakes):
        fakes[1].healthy, fakes[1].probe_s, fakes[1].handler = True, 0.0, None
        while client.num_live == 2 or not client._returns:
            await client.generate(request_of(f"r{time.monotonic()}"))
        servers[0].back = True
        while client.num_live < 2:
            await asyncio.sleep(0.01)

    servers = []
    _, _, warnings = run(scenario, num_servers=2, kind=Attached, known=servers)
    assert "It rejoins automatically if it recovers." in warnings[1] and "serves again" in warnings[-1]
    assert "2 of 2" not in warnings[1]


def test_server_that_recovers_without_a_valid_reply_is_removed():
    """Restarts that fix nothing must end at the limit."""

    class Useless(Attached):
        def restart(self, while_waiting=lambda: None):
            self.num_restarts += 1
            self.fake.healthy, self.fake.probe_s = True, 0.0

    async def scenario(client, fakes):
        async def page(body):
            return web.Response(text="<html>")

        fakes[0].healthy, fakes[0].probe_s, fakes[0].handler = True, 0.0, page
        with pytest.raises(ServerError, match="no valid reply since it was recovered 3 times: 3 consecutive invalid replies"):
            while True:
                with contextlib.suppress(InvalidReply):
                    await client.generate(request_of())

    _, (server,), _ = run(scenario, kind=Useless)
    assert server.num_restarts == 3


def test_close_does_not_wait_for_a_restart_in_progress():
    class Endless(Restartable):
        abandoned = threading.Event()

        def restart(self, while_waiting=lambda: None):
            self.abandoned.wait(30)
            raise ServerError("the run ends")

        def abandon(self):
            self.abandoned.set()

    async def scenario(client, fakes):
        call = asyncio.ensure_future(client.generate(request_of()))
        while not client._recoveries:
            await asyncio.sleep(0.01)
        call.cancel()

    began = time.monotonic()
    run(scenario, kind=Endless)
    assert time.monotonic() - began < 5


MOST_NEW = 4000


class Stub:
    """Stands in for ``AttachedServer``."""

    incarnation, is_ours, num_restarts = 1, False, 0

    def __init__(self, url: str) -> None:
        self.url = url

    def abandon(self) -> None:
        pass


async def whole(client: RecoveringClient, name: str) -> tuple[int, int]:
    """Continue from the known tokens, as windows do. Returns (number of tokens, number of aborts)."""
    num_tokens = num_cut = 0
    while num_tokens < MOST_NEW:
        request = request_of(f"{name}-{num_cut}", (3,) * (1 + num_tokens), max_new_tokens=MOST_NEW - num_tokens)
        answer = await client.generate(request)
        num_tokens += len(answer.token_ids)
        if answer.finish_reason != "abort":
            return num_tokens, num_cut
        num_cut += 1
    return num_tokens, num_cut


def write_list(file, text):
    """Replace the list at once: the client reads it every few milliseconds."""
    file.with_suffix(".new").write_text(text)
    file.with_suffix(".new").replace(file)


def run_with_list(scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_servers: int = 2):
    """Run ``scenario(client, stubs, urls, file, events)`` with one of ``urls`` in the run and a file that is polled."""
    monkeypatch.setattr(recovering_client, "_POLL_S", 0.01)
    monkeypatch.setattr(recovering_client, "_AGAIN_S", 0.05)
    events: list[str] = []

    async def main():
        stubs = [KvServer(10**6, step_tokens=8) for _ in range(num_servers)]
        urls = [await stub.start() for stub in stubs]
        file = tmp_path / "servers.urls"
        write_list(file, f"# the first\n{urls[0]}/\n\n")

        def attach(url: str) -> Stub:
            if url not in urls:
                raise ServerError("no SGLang server answers")
            return Stub(url)

        async def readmit(url: str) -> str:
            assert not any(body for body in stubs[urls.index(url)].bodies), "the server served before it had the weights"
            await asyncio.sleep(0.02)
            events.append(f"weights {urls.index(url)}")
            client.restarting.discard(url)
            return "weight version 3"

        async def settled() -> None:
            events.append("settled")

        client = RecoveringClient(
            RolloutConfig(), ServerPool([Stub(urls[0])]), vocab_size=100, warn=events.append, readmit=readmit, settled=settled
        )
        async with client:
            following = asyncio.create_task(recovering_client.follow_discovery(str(file), "", client, attach, events.append))
            try:
                return await asyncio.wait_for(scenario(client, stubs, urls, file, events), 30)
            finally:
                following.cancel()
                for stub in stubs:
                    await stub.stop()

    return asyncio.run(main()), events


async def until(holds) -> None:
    while not holds():
        await asyncio.sleep(0.005)


def test_joining_server_gets_weights_before_its_first_request(tmp_path, monkeypatch):
    async def scenario(client, stubs, urls, file, events):
        first = asyncio.create_task(whole(client, "a"))
        await until(lambda: stubs[0].bodies)
        write_list(file, "\n".join(urls))
        await until(lambda: urls[1] in client.client.live_urls)
        assert events[0] == "weights 1" and "has joined, with weight version 3: 2 serve" in events[1]
        answers = await asyncio.gather(first, *[whole(client, f"b{i}") for i in range(4)])
        assert all(num_cut == 0 for _, num_cut in answers)
        assert len(stubs[0].bodies) == 3 and len(stubs[1].bodies) == 2

    run_with_list(scenario, tmp_path, monkeypatch)


def test_leaving_server_returns_its_requests_with_their_tokens(tmp_path, monkeypatch):
    async def scenario(client, stubs, urls, file, events):
        write_list(file, "\n".join(urls))
        await until(lambda: len(client.client.live_urls) == 2)
        calls = [asyncio.create_task(whole(client, f"r{i}")) for i in range(4)]
        await until(lambda: stubs[0].num_generated > 20 and stubs[1].num_generated > 20)
        write_list(file, urls[1])
        await until(lambda: client.urls == [urls[1]])
        num_sent = len(stubs[0].bodies)
        answers = await asyncio.gather(*calls)
        assert sorted(num_cut for _, num_cut in answers) == [0, 0, 1, 1]
        assert len(stubs[0].bodies) == num_sent and stubs[0].aborted
        assert any("has left, and may be stopped: 1 serve" in event for event in events)
        # Aborted responses continued from their tokens: nothing was generated twice.
        continued = [body for body in stubs[1].bodies if len(body["input_ids"][0]) > 1]
        assert len(continued) == 2
        write_list(file, "\n".join(urls))  # the server may rejoin
        stubs[0].bodies.clear()
        await until(lambda: len(client.client.live_urls) == 2)
        await whole(client, "again")

    _, events = run_with_list(scenario, tmp_path, monkeypatch)
    assert events.index("settled") > events.index("weights 1")


def test_requests_may_return_before_their_abort_call_does(tmp_path, monkeypatch):
    async def scenario(client, stubs, urls, file, events):
        write_list(file, "\n".join(urls))
        await until(lambda: len(client.client.live_urls) == 2)
        calls = [asyncio.create_task(whole(client, f"r{i}")) for i in range(4)]
        await until(lambda: stubs[0].num_generated > 20 and stubs[1].num_generated > 20)
        abort, leaves = client.client.abort, client.client._servers[urls[0]]

        async def slow(rids):
            await abort(rids)
            await until(lambda: not leaves.tasks)

        monkeypatch.setattr(client.client, "abort", slow)
        write_list(file, urls[1])
        await until(lambda: client.urls == [urls[1]])
        assert [num_cut for _, num_cut in await asyncio.gather(*calls)].count(1) == 2

    _, events = run_with_list(scenario, tmp_path, monkeypatch)
    assert not any("could not be updated" in event for event in events)


def test_server_missing_in_a_single_poll_stays(tmp_path, monkeypatch):
    """The file may be read after its writer has emptied it and before new content is written."""
    polls = []

    def halfway(path, key):
        polls.append(named_urls(path, key))
        return polls[-1] if len(polls) % 2 else []

    monkeypatch.setattr(recovering_client, "named_urls", halfway)

    async def scenario(client, stubs, urls, file, events):
        write_list(file, "\n".join(urls))
        await until(lambda: len(polls) > 12)
        assert sorted(client.client.live_urls) == sorted(urls)

    _, events = run_with_list(scenario, tmp_path, monkeypatch)
    assert not any("left" in event or "lists no server" in event for event in events)


def test_membership_failure_is_reported_once_and_polling_continues(tmp_path, monkeypatch):
    async def scenario(client, stubs, urls, file, events):
        leave, failures = client.leave, [RuntimeError("a"), RuntimeError("a"), ValueError("b")]

        async def failing(url):
            if failures:
                raise failures.pop(0)
            await leave(url)

        monkeypatch.setattr(client, "leave", failing)
        write_list(file, urls[1])
        await until(lambda: client.urls == [urls[1]])

    _, events = run_with_list(scenario, tmp_path, monkeypatch)
    messages = [event.partition("could not be updated ")[2] for event in events if "could not be updated" in event]
    assert messages == ["(RuntimeError: a); retrying", "(ValueError: b); retrying"]


def test_last_server_stays_and_failed_joins_are_reported(tmp_path, monkeypatch):
    async def scenario(client, stubs, urls, file, events):
        write_list(file, "http://127.0.0.1:9\n")
        await until(lambda: any("cannot join: no SGLang server answers" in event for event in events))
        await until(lambda: any("lists no server that serves" in event for event in events))
        write_list(file, "not an address\n")
        await until(lambda: any("servers.urls:1: 'not an address' is not an address" in event for event in events))
        file.unlink()
        await asyncio.sleep(0.05)
        assert client.client.live_urls == [urls[0]]
        assert (await whole(client, "r"))[1] == 0

    run_with_list(scenario, tmp_path, monkeypatch)


def test_urls_folder_lists_the_servers_of_all_its_files(tmp_path):
    (tmp_path / "b.urls").write_text("http://b:1\nhttp://a:1/\n")
    (tmp_path / "a.urls").write_text("http://a:1\n")
    (tmp_path / ".c.urls.partial").write_text("http://half")
    assert named_urls(tmp_path) == ["http://a:1", "http://b:1"]
    assert named_urls(tmp_path / "absent.urls") == []
    (tmp_path / "bad.urls").write_text("host:1\n")
    with pytest.raises(UserError, match="bad.urls:1: 'host:1' is not an address"):
        named_urls(tmp_path)
