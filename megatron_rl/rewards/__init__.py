"""Rewards: functions found by name; plain ones run in killable worker processes, async ones on an event loop.

The names below are what the rest of the package uses; they are imported on first use, so that a worker process that
needs one reward does not pay for the others.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Reward": "registry",
    "RewardError": "registry",
    "available": "registry",
    "check_options": "registry",
    "register": "registry",
    "resolve": "registry",
    "AsyncRewardRunner": "workers.event_loop",
    "start_runner": "workers.event_loop",
    "Transient": "workers.session",
    "GradedItem": "router",
    "RewardRouter": "router",
    "build_rewards": "router",
    "RewardAlarm": "workers.processes",
    "RewardRunner": "workers.processes",
    "check_error_rate": "workers.processes",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
