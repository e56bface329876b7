"""Addresses of this machine that other machines can reach: no loopback address may leave the machine."""

import ipaddress
import socket
from urllib.parse import urlsplit

import psutil

from megatron_rl.errors import UserError

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_ANY_PORT = 80


def is_loopback(host: str) -> bool:
    """True if ``host``, a name or an address, is this machine itself; False for an unknown name."""
    try:
        address = ipaddress.ip_address(_resolved(host)[1][0])
    except OSError:
        return False
    return address.is_loopback or address.is_unspecified  # 0.0.0.0: all of its own addresses


def local_address_for(host: str) -> str:
    """This machine's address on the route to ``host``. Raises OSError where ``host`` is unknown or there is no route."""
    family, target = _resolved(host)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # a datagram socket only looks up the route, nothing is sent
        return str(probe.getsockname()[0])


def address_towards_all(urls: list[str], *, loopback_is: str = "") -> str:
    """This machine's address on the route to servers; one that is not loopback if any of them is elsewhere.

    ``loopback_is``: the machine that listed the URLs, which 127.0.0.1 means there.
    """
    hosts = [urlsplit(url).hostname or "" for url in urls]
    addresses = [local_address_for(loopback_is if loopback_is and is_loopback(host) else host) for host in hosts]
    elsewhere = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    return (elsewhere or addresses)[0]


def interface_of(address: str) -> str:
    """The network interface that has ``address``; empty for an address of another machine."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    return ""


def local_interface_for(host: str) -> str:
    """The interface that gloo has to listen on for peers on ``host``; empty where it finds a good one itself.

    It takes the address of this machine's name. Many a Linux has 127.0.1.1 for that, and peers on other machines would look
    for this one on themselves. ``host`` may be this machine, as others call it. Raises UserError where there is no telling.
    """
    if host in LOOPBACK:
        raise UserError(
            f"MASTER_ADDR={host}: ranks on other nodes would look for rank 0 on themselves; set it to the first node's name or "
            "address"
        )
    name = socket.gethostname()
    try:
        own = str(_resolved(name)[1][0])
    except OSError:
        own = "no address"
    if interface_of(own) and not is_loopback(own):
        return ""
    if not is_loopback(host):
        try:
            return interface_of(local_address_for(host))
        except OSError:
            return ""  # the connection attempt reports it
    found = _reachable_addresses()
    if len(found) != 1:
        raise UserError(
            f"the name of this node, {name}, leads to {own}, which other nodes cannot reach. Set GLOO_SOCKET_IFNAME (and "
            "NCCL_SOCKET_IFNAME) to the interface of the job's network. This node has "
            + (", ".join(f"{interface} ({address})" for interface, address in found.items()) or "loopback alone")
        )
    return next(iter(found))


def _reachable_addresses() -> dict[str, str]:
    """Interface -> IPv4 address, without loopback."""
    return {
        name: one.address
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family == socket.AF_INET and not is_loopback(one.address)
    }


def _resolved(host: str) -> tuple[int, tuple]:
    """(family, socket address) of ``host``, IPv4 before IPv6: gloo's and SGLang's own sockets prefer it."""
    found = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    family, _, _, _, target = min(found, key=lambda one: one[0] != socket.AF_INET)
    return family, target


def address_problem(url: str) -> str:
    """Why this is no address of a server; empty if it is one."""
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        is_one = False
    return "" if is_one and not any(map(str.isspace, url)) else f"{url[:80]!r} is not an address; expected http://host:port"
