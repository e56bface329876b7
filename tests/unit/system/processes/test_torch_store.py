"""Stores listen on their own address alone, and ranks rendezvous there."""

import os
import subprocess
import sys

import psutil
import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters

from megatron_rl.system.processes.torch_store import LocalRendezvous, listening_store, register_local_rendezvous


def listened_on(port: int) -> set[str]:
    connections = psutil.Process().net_connections("inet")
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port}


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_a_store_listens_on_its_address_alone_and_keeps_what_others_set(address):
    store = listening_store(address, world_size=2, timeout_s=5.0)
    assert listened_on(store.port) == {address}
    other = TCPStore(address, store.port, 2, is_master=False)
    other.set("key", "value")
    assert store.get("key") == b"value"


def test_an_address_of_another_machine_is_an_error():
    with pytest.raises(OSError, match="assign"):
        listening_store("192.0.2.1", world_size=1, timeout_s=1.0)


def test_a_machine_meets_itself_at_once():
    register_local_rendezvous()
    register_local_rendezvous()
    met = LocalRendezvous(RendezvousParameters("x", "", "run", 1, 1)).next_rendezvous()
    assert (met.rank, met.world_size, met.bootstrap_store_info.master_addr) == (0, 1, "127.0.0.1")
    assert listened_on(met.bootstrap_store_info.master_port) == {"127.0.0.1"}


RANKS = """
import os, psutil
import torch.distributed as dist
dist.init_process_group("gloo")
launcher = psutil.Process(os.getppid())
processes = [launcher, *launcher.children(recursive=True)]
dist.barrier()
found = {c.laddr.ip for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN}
dist.barrier()
line = " ".join(["rank", str(dist.get_rank()), "listens", *sorted(found)])
os.write(1, (line + os.linesep).encode())  # in one piece: print writes a line in several, and two ranks share the pipe
"""


def test_ranks_started_here_meet_on_this_machine_alone(tmp_path):
    program = (
        "import sys\n"
        "from megatron_rl.system.processes import torchrun\n"
        "sys.exit(torchrun.launch(['--standalone', '--nproc-per-node', '2', sys.argv[1]]))\n"
    )
    (tmp_path / "trainer_ranks.py").write_text(RANKS)
    command = [sys.executable, "-c", program, str(tmp_path / "trainer_ranks.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert sorted(done.stdout.splitlines()) == ["rank 0 listens 127.0.0.1", "rank 1 listens 127.0.0.1"], done.stderr
