"""Servers that files and addresses list."""

import json

import pytest
from aiohttp import web

from megatron_rl.errors import UserError
from megatron_rl.system.http.addresses import address_problem
from megatron_rl.system.http.url_files import named_urls
from tests.unit.local_service import local_service

TWO = ["http://a:1", "https://b.example:2/sglang"]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/urls", "# of today\n\nhttp://a:1/\n  https://b.example:2/sglang \nhttp://a:1\n"),
        ("/urls.json", json.dumps([*TWO, TWO[0] + "/"])),
        ("/workers", json.dumps({"workers": [{"url": TWO[0], "is_healthy": False}, {"id": 3}, {"url": TWO[1]}], "total": 2})),
        ("", json.dumps({"workers": TWO})),
        ("/", json.dumps({"workers": TWO})),
    ],
)
def test_an_address_names_each_server_once(path, text):
    with local_service(lambda asked, body: web.Response(text=text)) as service:
        assert named_urls(service.url + path) == TWO
        assert [asked for asked, _ in service.requests] == [path.rstrip("/") or "/workers"]


@pytest.mark.parametrize("text", ["", "[]", '{"workers": []}', "# none yet\n"])
def test_url_address_may_list_no_servers_yet(text):
    with local_service(lambda asked, body: web.Response(text=text)) as service:
        assert named_urls(service.url) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<html>", "urls:1: '<html>' is not an address; expected http://host:port"),
        ('{"servers": ["http://a:1"]}', "is not a list of URLs"),
        ("17", "'17' is not a list of URLs"),
        ('["a:1"]', "'a:1' is not an address"),
        ('["http://a:1", "http://a:99999"]', "'http://a:99999' is not an address"),
    ],
)
def test_content_without_server_urls_is_an_error_that_quotes_it(text, expected):
    with local_service(lambda asked, body: web.Response(text=text)) as service, pytest.raises(UserError) as raised:
        named_urls(service.url + "/urls")
    assert expected in str(raised.value)


def test_an_address_that_does_not_answer_may_do_so_later_and_one_that_says_no_never():
    with local_service(lambda asked, body: web.Response(status=503, text="no")) as service, pytest.raises(OSError, match="503: no"):
        named_urls(service.url)
    with pytest.raises(OSError, match="does not answer"):
        named_urls(service.url)
    words = "answered 404.*an address without a path belongs to a router: list servers in rollout.urls"
    with local_service(lambda asked, body: web.Response(status=404)) as service, pytest.raises(UserError, match=words):
        named_urls(service.url)


@pytest.mark.parametrize("url", ["http://a:1", "http://[::1]:8", "https://gateway/sglang", "http://host"])
def test_an_address(url):
    assert address_problem(url) == ""


@pytest.mark.parametrize(
    "url", ["", "a:1", "http://", "http://:3", "ftp://a:1", "http://a:b", "http://a:70000", "http://a:0", "http://a b:3"]
)
def test_no_address(url):
    assert "is not an address; expected http://host:port" in address_problem(url)
