"""Arguments that the program has given back as its results: a later change of one also changes what was given."""

import sys
from collections.abc import Collection
from typing import Any

from megatron_rl.graders.sandbox.values import Snapshot, is_unchanged, snapshot


class Aliases:
    """Adds "aliased" to ``given`` if such a container changes later."""

    def __init__(self, given: set[str]) -> None:
        self._given = given
        self.known: list[tuple[Any, Snapshot]] = []

    def look(self, allowed: Collection[int] = ()) -> None:
        """Notice changes since the last look, except of containers with the ids ``allowed``. Forgets what the tests have no more."""
        if any(id(each) not in allowed and not is_unchanged(each, content) for each, content in self.known):
            self._given.add("aliased")
        self.known = [(each, snapshot(each)) for each, _ in self.known if sys.getrefcount(each) > 3]

    def add(self, result: Any, arguments: list[Any]) -> None:
        """Keep those of the containers ``arguments`` that a result is, or holds."""
        parts = {id(part) for part in (result, *(result if type(result) in (list, tuple) else ()))}
        self.known += [(each, snapshot(each)) for each in arguments if id(each) in parts]
