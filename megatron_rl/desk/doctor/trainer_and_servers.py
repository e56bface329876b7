"""Opens a recipe's servers next to its trainer, without a run, for commands that need both."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from megatron_rl.config.schema import Config
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.errors import UserError
from megatron_rl.rollout.service import RolloutService, TrainerHooks, open_rollout
from megatron_rl.rollout.weight_sources import TrainerWeights
from megatron_rl.step.driver import event_loop_thread, stall_timeout_s
from megatron_rl.step.runner import HEARTBEAT_S
from megatron_rl.training.trainer_group import TrainerGroup

WaitFor = Callable[[Coroutine[Any, Any, Any]], Any]


@contextmanager
def temporary_servers(
    config: Config, group: TrainerGroup, tokenizer: Tokenizer, *, note: Callable[[str], None] = lambda text: None
) -> Iterator[tuple[RolloutService, WaitFor]]:
    """Yields the servers, and a function that runs a coroutine on their event loop until it returns. Driver only.

    Servers are not restarted here: a lost server raises UserError, because its replacement might not reproduce the
    problem. A wait beyond a run's longest timeout raises TimeoutError.
    """
    with event_loop_thread() as event_loop:

        def wait_for(work: Coroutine[Any, Any, Any]) -> Any:
            future = asyncio.run_coroutine_threadsafe(work, event_loop)
            deadline_s = time.monotonic() + stall_timeout_s(config)
            while True:
                try:
                    return future.result(HEARTBEAT_S)
                except TimeoutError:
                    if future.done() or time.monotonic() > deadline_s:
                        raise
                    # The other ranks wait for the next command: a heartbeat keeps them from timing out.
                    group.heartbeat()

        trainer = TrainerHooks(
            TrainerWeights(config, group, "policy"), _refused, note=note, warn=note, while_waiting=group.heartbeat
        )
        with open_rollout(config, event_loop, trainer, tokenizer=tokenizer, environment=None) as rollout:
            yield rollout, wait_for


def _refused(work: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(UserError("a server was lost; see its log"))
    return future
