"""What an SGLang server would leave behind when it is killed, and what keeps its API key out of sight.

A server has a private folder for its temporary files (the sockets of its processes among them); whoever stops the server
removes it. Its loads, which it writes into shared memory, lose their name as soon as all its processes have them open:
then nothing is left, however it ends.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import psutil

from megatron_rl.rollout.sglang.process.options import ServerOptions, secret_config
from megatron_rl.system.http.json_http import HttpError, bearer, get_once

_LOADS = "/dev/shm/sglang_loads_"
_MAX_SOCKET_FOLDER = 80
"""Linux limits the path of a socket to 107 characters."""


def write_secret(options: ServerOptions, folder: Path) -> str:
    """A file with the API key that only this user can read, for ``server_command``; empty where there is no key."""
    if not options.api_key:
        return ""
    path = folder / "config.yaml"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(secret_config(options))
    return str(path)


def temporary_files_in(folder: Path) -> dict[str, str]:
    """Environment of a server whose temporary files go there. Compiled code stays where other servers find it."""
    if len(str(folder)) > _MAX_SOCKET_FOLDER:
        return {}
    cache = folder.parent / f"torchinductor_{os.getuid()}"
    return {"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(cache))}


def unlink_shared_memory(pids: Sequence[int], url: str, options: ServerOptions) -> None:
    """Unlink the loads of a server that is ready; its processes keep what they have open."""
    if any("dp" in name and "size" in name for name in options.server_args):
        return  # one more process opens them, and nobody knows when
    try:
        # SGLang's HTTP process opens them when it is asked for them first.
        if get_once(f"{url}/v1/loads", timeout_s=10.0, headers=bearer(options.api_key)).status != 200:
            return
    except HttpError:
        return
    for pid in pids:
        try:
            paths = {file.path for file in psutil.Process(pid).open_files()}
        except psutil.Error:
            continue
        for path in paths:
            if path.startswith(_LOADS):
                Path(path).unlink(missing_ok=True)


def remove_shared_memory(pids: Sequence[int]) -> None:
    """Of processes that are gone: what the workers of one server exchanged."""
    for pid in pids:
        for path in Path("/dev/shm").glob(f"sgl_shm_*_{pid}_*"):
            path.unlink(missing_ok=True)
