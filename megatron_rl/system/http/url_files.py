"""Lists of running servers: files with one URL per line (``megatron-rl serve --url-file``), or an address that returns them."""

import json
from pathlib import Path
from urllib.parse import urlsplit

from megatron_rl.errors import UserError
from megatron_rl.system.files.probes import read_regular
from megatron_rl.system.http.addresses import address_problem
from megatron_rl.system.http.json_http import HttpError, bearer, get_once

_ANSWER_S = 10.0
_MAX_BYTES = 2**20
"""Largest list: 1 MiB, tens of thousands of servers."""
_SCHEMES = ("http://", "https://")


def named_urls(where: str | Path, key: str = "") -> list[str]:
    """Return each URL once, from a file, from all ``*.urls`` files of a folder, or from an address; empty without a file (yet).

    An address without a path belongs to a router (sglang-router): its /workers are requested, with the API key ``key``. Another
    address returns JSON (a list of URLs, also under ``workers``) or one URL per line. Empty lines and lines that begin with #
    are ignored. Raises UserError for content other than server URLs, and OSError without a reply or for status 5xx.
    """
    if str(where).startswith(_SCHEMES):
        return _asked(str(where).rstrip("/"), key)
    path = Path(where)
    urls: dict[str, None] = {}
    for file in sorted(path.glob("*.urls")) if path.is_dir() else [path]:
        try:
            urls |= dict.fromkeys(_of_lines(read_regular(file, _MAX_BYTES).decode(errors="replace"), str(file)))
        except FileNotFoundError:  # removed since it was listed
            continue
    return list(urls)


def urls_of_workers(content: object) -> list[str] | None:
    """URLs that a router lists, as strings or as objects with a ``url``; None for any other reply."""
    workers = content.get("workers") if isinstance(content, dict) else content
    if not isinstance(workers, list):
        return None
    urls = [worker.get("url") if isinstance(worker, dict) else worker for worker in workers]
    return [url.rstrip("/") for url in urls if isinstance(url, str)]


def _asked(address: str, key: str) -> list[str]:
    is_router = not urlsplit(address).path
    address += "/workers" * is_router
    try:
        answer = get_once(address, timeout_s=_ANSWER_S, headers=bearer(key))
    except HttpError as error:
        raise OSError(f"{address} does not answer ({error})") from error
    if answer.status >= 500:
        raise OSError(f"{address} answered {answer.status}: {answer.text[:200]}")
    if answer.status != 200:
        server = "; an address without a path belongs to a router: list servers in rollout.urls" if is_router else ""
        raise UserError(f"{address} answered {answer.status}: {answer.text[:200]!r}, expected the URLs of servers{server}")
    try:
        content = json.loads(answer.text)
    except (ValueError, RecursionError):
        return _of_lines(answer.text, address)
    urls = urls_of_workers(content)
    if urls is None or (wrong := next(filter(None, map(address_problem, urls)), "")):
        problem = f"{answer.text[:80]!r} is not a list of URLs" if urls is None else wrong
        raise UserError(f"{address}: {problem}")
    return list(dict.fromkeys(urls))


def _of_lines(text: str, source: str) -> list[str]:
    urls: dict[str, None] = {}
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        if line and not line.startswith("#"):
            if problem := address_problem(line):
                raise UserError(f"{source}:{number}: {problem}")
            urls[line.rstrip("/")] = None
    return list(urls)
