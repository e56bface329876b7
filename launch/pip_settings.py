"""Prints pip's settings of registries as uv's environment variables, for a shell: pip config list | python launch/pip_settings.py

uv reads none of pip's settings. With these it searches the same registries and folders in the same way: all of them, for the best version.
"""

import ast
import os
import shlex
import sys

NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "no-cache-dir": "UV_NO_CACHE",
    "cert": "SSL_CERT_FILE",
}
SECTIONS = ("global", "install", ":env:")
"""Sections of pip's settings, the strongest last."""

found = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
for line in sorted(sys.stdin, key=lambda line: [line.startswith(section) for section in reversed(SECTIONS)]):
    key, _, value = line.strip().partition("=")
    section, _, name = key.rpartition(".")
    if section in SECTIONS and name in NAMES:
        separator = "," if name == "find-links" else " "
        found[NAMES[name]] = separator.join(str(ast.literal_eval(value)).split())
print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in found.items() if name not in os.environ))
