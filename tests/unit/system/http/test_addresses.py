"""Addresses of this machine that another machine reaches. Interfaces and names are faked where they matter."""

import socket
from types import SimpleNamespace

import psutil
import pytest

from megatron_rl.errors import UserError
from megatron_rl.system.http import addresses

NAMES = {"node0": "127.0.1.1", "node7": "10.0.0.7", "self": "10.0.0.1"}


@pytest.fixture
def machine(monkeypatch):
    """One with eth0 at 10.0.0.1, whose own name is ``node0``; every way to another machine begins there."""

    def resolve(host, port, type=0):
        if host.replace(".", "").isdigit():
            return [(socket.AF_INET, type, 0, "", (host, port))]
        if host == "localhost":
            return [(socket.AF_INET6, type, 0, "", ("::1", port, 0, 0)), (socket.AF_INET, type, 0, "", ("127.0.0.1", port))]
        if host not in NAMES:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, type, 0, "", (NAMES[host], port))]

    class Probe:
        def __init__(self, family, kind):
            self.target = ""

        def __enter__(self):
            return self

        def __exit__(self, *exc_info):
            pass

        def connect(self, target):
            self.target = target[0]

        def getsockname(self):
            return ("127.0.0.1" if self.target.startswith("127.") else "10.0.0.1", 5)

    interfaces = {"lo": "127.0.0.1", "eth0": "10.0.0.1"}
    monkeypatch.setattr(addresses.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(addresses.socket, "socket", Probe)
    monkeypatch.setattr(addresses.socket, "gethostname", lambda: "node0")
    monkeypatch.setattr(
        psutil,
        "net_if_addrs",
        lambda: {name: [SimpleNamespace(address=one, family=socket.AF_INET)] for name, one in interfaces.items()},
    )
    return interfaces


@pytest.mark.parametrize(
    ("urls", "driver", "address"),
    [
        (["http://127.0.0.1:1"], "", "127.0.0.1"),
        (["http://localhost:1", "http://node7:1"], "", "10.0.0.1"),
        (["http://127.0.0.1:1"], "node7", "10.0.0.1"),
        (["http://localhost:1"], "10.0.0.7", "10.0.0.1"),
        (["http://127.0.0.1:1"], "127.0.0.1", "127.0.0.1"),
        (["http://0.0.0.0:1"], "node7", "10.0.0.1"),
        (["http://node0:1"], "node7", "10.0.0.1"),  # as its own machine resolves that name: not as this one should use it
    ],
)
def test_a_loopback_address_stays_on_the_machine_of_whoever_named_it(machine, urls, driver, address):
    assert addresses.address_towards_all(urls, loopback_is=driver) == address


def test_a_name_that_the_machine_has_as_loopback_leads_gloo_to_the_way_to_the_others(machine):
    assert addresses.local_interface_for("node7") == "eth0"
    assert addresses.local_interface_for("node0") == "eth0"  # this machine, and it has one other interface
    machine["ib0"] = "10.1.0.1"
    with pytest.raises(UserError, match=r"node0, leads to 127.0.1.1.*GLOO_SOCKET_IFNAME.*eth0 \(10.0.0.1\), ib0 \(10.1.0.1\)"):
        addresses.local_interface_for("node0")


def test_a_good_name_is_left_to_gloo(machine, monkeypatch):
    monkeypatch.setitem(NAMES, "node0", "10.0.0.1")
    assert addresses.local_interface_for("node7") == ""


def test_host_name_without_a_local_interface_is_rejected(machine, monkeypatch):
    """As in a container, or after a move to another address."""
    monkeypatch.setitem(NAMES, "node0", "192.168.9.9")
    assert addresses.local_interface_for("node7") == "eth0"


@pytest.mark.parametrize("driver", ["127.0.0.1", "localhost"])
def test_ranks_on_several_machines_do_not_meet_at_loopback(machine, driver):
    with pytest.raises(UserError, match=f"MASTER_ADDR={driver}: ranks on other nodes"):
        addresses.local_interface_for(driver)


def test_this_machines_own_addresses_have_interfaces():
    assert addresses.interface_of("127.0.0.1") == "lo" and addresses.is_loopback("127.0.0.1")
    assert addresses.interface_of("203.0.113.9") == "" and not addresses.is_loopback("no.such.host.invalid")
    assert addresses.local_address_for("127.0.0.1") == "127.0.0.1"
