"""Rewards, resolved by name: plain functions run in killable worker processes, async functions on an event loop.

``register`` and ``Score`` are all that a file with a custom reward needs.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_rl.data.trajectory import Score
    from megatron_rl.rewards.registry import register

__all__ = ["Score", "register"]


def __getattr__(name: str) -> Any:
    """Import lazily, because the sandbox's processes are in this package and must import nothing but the sandbox."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    from megatron_rl.rewards import registry

    return getattr(registry, name)
