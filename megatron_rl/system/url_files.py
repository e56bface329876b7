"""Files that name running servers, a URL per line, as ``megatron-rl serve --url-file`` writes them."""

from pathlib import Path

from megatron_rl.errors import UserError


def named_urls(path: str | Path) -> list[str]:
    """Each URL once, of a file or of all ``*.urls`` files of a folder; nothing where there is none (yet).

    Empty lines and lines that begin with # say nothing. Raises UserError for another line that is no address, and OSError.
    """
    path = Path(path)
    urls: dict[str, None] = {}
    for file in sorted(path.glob("*.urls")) if path.is_dir() else [path]:
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:  # gone since it was listed
            continue
        for number, line in enumerate(map(str.strip, lines), start=1):
            if not line or line.startswith("#"):
                continue
            if not line.startswith(("http://", "https://")):
                raise UserError(f"{file}:{number}: {line[:80]!r} is not an address; expected http://host:port")
            urls[line.rstrip("/")] = None
    return list(urls)
