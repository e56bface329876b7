"""Key-value stores of torch.distributed that listen on a single address, and a rendezvous for torchrun based on such a store.

torch's TCPStore has no authentication, and a master store listens on all addresses of the machine, regardless of the given
one. It accepts a socket that listens already, though. Importing this module imports torch.
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
    """Create a store on a free port of ``address`` alone. Raises OSError for an address of another machine."""
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
    """Rendezvous of the ranks of one machine at 127.0.0.1, complete from the start."""

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
        """Do nothing, because no other node can join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def register_local_rendezvous() -> None:
    """Register ``LocalRendezvous`` with torchrun under the name LOCAL_RENDEZVOUS; may be called repeatedly."""
    rendezvous_handler_registry.register(LOCAL_RENDEZVOUS, LocalRendezvous)
