"""The part of a graph that a record knows, so that a new stage does not need new records."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from megatron_rl.schedule.graph import Stage


def only_with(names: Collection[str], graph: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages ``names`` of ``graph``, without needs of the products that other stages make."""
    new = {product for stage in graph if stage.name not in names for product in stage.products}

    def known(needs: str) -> str:
        return " ".join(need for need in needs.split() if need.partition(":")[0] not in new)

    return tuple(
        replace(stage, needs=known(stage.needs), needs_before=known(stage.needs_before)) for stage in graph if stage.name in names
    )
