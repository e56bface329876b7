"""Serves this machine's arrays to ranks on other machines: ``python -m megatron_rl.parallel.array_server PARENT``.

A process next to the driver serves the arrays at given addresses (``system/files/shared_file.py``) by Arrow Flight (DoGet: it is
not collective, and delivers arrays), so that their bytes pass neither rank 0 nor the rollout workers. A ticket consists of a
secret of the driver, which ranks get over the control group, and the table of addresses. Like all traffic between the machines of
a job it is not encrypted. The process ends with its parent.
"""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from megatron_rl.errors import UserError
from megatron_rl.system.files.shared_file import bytes_at
from megatron_rl.system.processes.child_process import (
    SECRET_BYTES,
    WITHOUT_GPU,
    begin_child,
    is_secret,
    new_secret,
    read_secret,
    start_module,
)

_BATCH_BYTES = 1 << 24
"""Size of a message: small arrays share a message, because one message per array would take longer than its bytes."""
_SCHEMA = pa.schema([("bytes", pa.uint8())])


class ArrayServerAddress(NamedTuple):
    """Address of a process that serves a machine's arrays."""

    location: str
    secret: str


class Reachability(NamedTuple):
    """The arrays that a replica's ranks can map, and the servers of all other arrays. Nodes are numbered as in addresses."""

    node: int
    """Node whose files the replica's root can map; -1: none."""
    by_all: bool
    """True if all ranks of the replica can map them."""
    services: Mapping[int, ArrayServerAddress | None]
    """Maps each node to the server of its arrays."""

    def maps(self, nodes: set[int]) -> bool:
        """True if each rank can map all arrays on these nodes."""
        return self.by_all and nodes <= {self.node}

    def read(self, node: int, addresses: np.ndarray) -> np.ndarray:
        """[bytes] uint8: the arrays of ``node`` at ``addresses`` [k, 4], concatenated. Raises as ``read_arrays``."""
        # One buffer, because joining the chunks would copy all bytes a second time.
        found, end = np.empty(int(addresses[:, -1].sum()), np.uint8), 0
        for chunk in read_arrays(addresses, None if node == self.node else self.services[node]):
            found[end : end + len(chunk)] = chunk
            end += len(chunk)
        return found


def read_arrays(addresses: np.ndarray, service: ArrayServerAddress | None) -> Iterator[np.ndarray]:
    """Bytes of the arrays at ``addresses`` [k, 4], in order, in chunks: mapped here, or from their machine's service.

    Raises UserError if the service does not reply, or not in full.
    """
    if service is None:
        yield from bytes_at(addresses)
        return
    ticket = flight.Ticket(bytes.fromhex(service.secret) + np.ascontiguousarray(addresses, np.int64).tobytes())
    num_bytes, expected = 0, int(addresses[:, -1].sum())
    try:
        with flight.connect(service.location) as client:
            for chunk in client.do_get(ticket):
                (column,) = chunk.data.columns
                yield column.to_numpy()
                num_bytes += len(column)
    except (flight.FlightError, pa.ArrowException) as error:
        raise UserError(
            f"the arrays of another machine could not be fetched from {service.location}: {error}. Ranks connect to that address (the "
            "node's own, at a port that the system chooses); check that no firewall blocks connections between the nodes"
        ) from error
    if num_bytes != expected:
        raise UserError(f"expected {expected} bytes of arrays from {service.location}, got {num_bytes}")


class ArrayServer(flight.FlightServerBase):
    """Serves all arrays that this process can map."""

    def __init__(self, secret: bytes) -> None:
        # Port 0: the system chooses a free port, because several runs may share a node.
        super().__init__("grpc://0.0.0.0:0")
        self._secret = secret

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.GeneratorStream:
        secret, table = ticket.ticket[:SECRET_BYTES], ticket.ticket[SECRET_BYTES:]
        if not is_secret(secret, self._secret):
            raise flight.FlightUnauthenticatedError("the request has another secret than this run's")
        return flight.GeneratorStream(_SCHEMA, _batches(np.frombuffer(table, np.int64).reshape(-1, 4)))


def _batches(addresses: np.ndarray) -> Iterator[pa.RecordBatch]:
    waiting: list[np.ndarray] = []
    num_bytes = 0
    for piece in read_arrays(addresses, None):
        waiting.append(piece)
        num_bytes += len(piece)
        if num_bytes >= _BATCH_BYTES:
            yield _batch(waiting)
            waiting, num_bytes = [], 0
    if waiting:
        yield _batch(waiting)


def _batch(pieces: list[np.ndarray]) -> pa.RecordBatch:
    return pa.record_batch([pa.array(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))], schema=_SCHEMA)


def start_array_server(host: str) -> ArrayServerAddress:
    """Start a server of this machine's arrays, which other machines reach as ``host``; it ends with this process."""
    secret = new_secret()
    process = start_module("megatron_rl.parallel.array_server", message=secret, stdout=subprocess.PIPE, environment=WITHOUT_GPU)
    assert process.stdout is not None
    with process.stdout:
        port = process.stdout.readline().decode().strip()
    if not port:
        raise UserError("the process that serves arrays to ranks on other machines did not start; its traceback is above")
    return ArrayServerAddress(f"grpc://{f'[{host}]' if ':' in host else host}:{port}", secret.hex())


def main() -> None:
    begin_child(int(sys.argv[1]))
    server = ArrayServer(read_secret())
    print(server.port, flush=True)
    server.serve()


if __name__ == "__main__":
    main()
