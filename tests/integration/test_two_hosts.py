"""Laws of addresses between machines, on two network namespaces: what one host tells the other leads back to it."""

import json
import sys

import pytest

from tests.integration import two_hosts
from tests.integration.two_hosts_worker import OTHER, OWN

pytestmark = pytest.mark.skipif(bool(two_hosts.obstacle()), reason=two_hosts.obstacle())


def test_a_stage_on_another_node_sends_weights_to_servers_on_the_drivers_loopback(tmp_path):
    environment = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": two_hosts.FIRST, "MASTER_PORT": "29511"}
    command = [sys.executable, "-m", "tests.integration.two_hosts_worker", str(tmp_path)]
    status = two_hosts.run_on_both(command, environment, tmp_path / "log", timeout_s=200)
    assert status == 0, (tmp_path / "log").read_text()
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["addresses"] == ["127.0.0.1", two_hosts.SECOND]
    assert seen["tensors"] == {name: tensor.tolist() for name, tensor in {**OWN, **OTHER}.items()}
    # The host's name is no address of the namespace: gloo listens on the way to the other host, the server's too.
    assert seen["gloo"] == "here"
