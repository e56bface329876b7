"""Key-value stores of torch.distributed that listen on one address, and torchrun's meeting place made of one.

torch's TCPStore has no authentication, and as the master it listens on all addresses of the machine, whichever it is
given. It takes a socket that listens already, though. Importing this imports torch.
"""

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore  # torch.distributed has it, but not for type checkers
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

LOCAL_RENDEZVOUS = "megatron-rl-local"
"""torchrun's ``--rdzv-backend`` after ``register_local_rendezvous``."""
_LOOPBACK = "127.0.0.1"
_TIMEOUT_S = 600.0


def listening_store(address: str, *, world_size: int, timeout_s: float) -> TCPStore:
    """A store of this process on a free port of ``address`` only. Raises OSError for an address of another machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        listener.listen()
        return TCPStore(
            address,
            listener.getsockname()[1],
            world_size,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),  # the store closes it
        )


class LocalRendezvous(RendezvousHandler):
    """The ranks of one machine meet at 127.0.0.1. Its one node is complete at once."""

    use_agent_store = True

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._store = listening_store(_LOOPBACK, world_size=1, timeout_s=_TIMEOUT_S)

    def get_backend(self) -> str:
        return LOCAL_RENDEZVOUS

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(_LOOPBACK, self._store.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def register_local_rendezvous() -> None:
    """Teach torchrun LOCAL_RENDEZVOUS; more than once does no harm."""
    rendezvous_handler_registry.register(LOCAL_RENDEZVOUS, LocalRendezvous)
