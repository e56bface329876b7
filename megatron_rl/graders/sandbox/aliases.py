"""Containers that the program gave while it may still change them: arguments as its results, and what ``with`` gives."""

import sys
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

from megatron_rl.graders.sandbox.side_record import content_of
from megatron_rl.graders.sandbox.values import Snapshot, is_unchanged, snapshot

_MAX_PARTS = 256
"""Larger containers are not compared with what the program has been handed."""


class Aliases:
    """Adds "aliased" to ``given`` if such a container changes later, other than in a call that it is an argument of, or becomes what
    the program has been handed since: the tests may compare it with that."""

    def __init__(self, given: set[str]) -> None:
        self._given = given
        self.known: list[tuple[Any, Snapshot, bool]] = []
        """(container, content, whether ``with`` has given it)."""
        self._handed: set[tuple[int, str]] = set()
        """(id, content) of containers."""

    def look(self, records: Mapping[str, type], allowed: Collection[int] = (), handed: Collection[Any] = ()) -> None:
        """Notice changes since the last look. Forgets what the tests have no more.

        Args:
            records: Classes of the prompt.
            allowed: Ids of containers that may change.
            handed: Containers of the call.
        """
        changed = [(each, is_live) for each, content, is_live in self.known if not is_unchanged(each, content)]
        own = {id(each) for each, _ in changed}
        small = [each for each in handed if id(each) not in own and 0 < len(snapshot(each)) <= _MAX_PARTS]
        self._handed |= {(id(each), content_of(each, records)) for each in small}
        for each, is_live in changed:
            content = content_of(each, records) if self._handed else ""
            is_copied = any(content == other and number != id(each) for number, other in self._handed)
            if is_copied or not (is_live or id(each) in allowed):
                self._given.add("aliased")
        self.known = [(each, snapshot(each), is_live) for each, _, is_live in self.known if sys.getrefcount(each) > 3]

    def add(self, result: Any, arguments: list[Any], *, is_live: bool) -> None:
        """Keep those of the containers ``arguments`` that a result is, or holds; or the result that ``with`` gives."""
        if is_live:
            arguments = [result] if type(result) in (list, dict, set, deque, bytearray) else []
        parts = {id(part) for part in (result, *(result if type(result) in (list, tuple) else ()))}
        self.known += [(each, snapshot(each), is_live) for each in arguments if id(each) in parts]
