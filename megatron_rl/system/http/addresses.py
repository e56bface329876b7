"""Addresses of this machine that other machines can reach; loopback addresses must not be sent to them."""

import ipaddress
import re
import socket
from urllib.parse import urlsplit

import psutil

from megatron_rl.errors import UserError

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_ANY_PORT = 80
_WORD = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_MAX_HOST = 253
"""Characters of a host name (RFC 1035)."""


def is_loopback(host: str) -> bool:
    """True if ``host``, a name or an address, is a loopback address of this machine; False for an unknown name."""
    try:
        address = ipaddress.ip_address(_resolved(host)[1][0])
    except OSError:
        return False
    return address.is_loopback or address.is_unspecified  # 0.0.0.0: all addresses of this machine


def local_address_for(host: str) -> str:
    """Return this machine's address on the route to ``host``. Raises OSError if ``host`` is unknown or there is no route."""
    family, target = _resolved(host)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # a datagram socket only looks up the route and sends nothing
        return str(probe.getsockname()[0])


def address_towards_all(urls: list[str], *, loopback_is: str = "") -> str:
    """Return this machine's address on the route to servers; not a loopback address if any server is on another machine.

    ``loopback_is``: the machine that listed the URLs, and that 127.0.0.1 in them means.
    """
    hosts = [urlsplit(url).hostname or "" for url in urls]
    addresses = [local_address_for(loopback_is if loopback_is and is_loopback(host) else host) for host in hosts]
    elsewhere = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    return (elsewhere or addresses)[0]


def interface_of(address: str) -> str:
    """Return the network interface that has ``address``; empty for an address of another machine."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    return ""


def local_interface_for(host: str) -> str:
    """Return the interface that gloo must listen on for peers on ``host``; empty if gloo's own choice is reachable.

    Gloo takes the address of this machine's host name. Many Linux systems map that name to 127.0.1.1, which on another machine
    means that other machine. ``host`` may be a name of this machine. Raises UserError if the interface is ambiguous.
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
    """Return (family, socket address) of ``host``, IPv4 before IPv6, which the sockets of gloo and SGLang prefer too."""
    found = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    family, _, _, _, target = min(found, key=lambda one: one[0] != socket.AF_INET)
    return family, target


def is_host(text: str) -> bool:
    """True for an IP address and for the form of a host name. A name whose last part is a number is an address."""
    try:
        ipaddress.ip_address(text)
        return True
    except ValueError:
        words = text.split(".")
    return len(text) <= _MAX_HOST and all(map(_WORD.fullmatch, words)) and not words[-1].isdecimal()


def host_problem(host: str) -> str:
    """Return the reason why this machine cannot find ``host``; empty if it can."""
    try:
        _resolved(host)
    except OSError as error:
        return f"this machine does not know the host {host!r} ({error.strerror}); correct the name, or write the address"
    return ""


def listen_problem(host: str) -> str:
    """Return the reason why a server on this machine cannot listen on ``host``; empty if it can."""
    if problem := host_problem(host):
        return problem
    family, target = _resolved(host)
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((target[0], 0))
    except OSError as error:
        return (
            f"no server of this machine can listen on {host!r} ({error.strerror}); write one of its own addresses, or 127.0.0.1 for "
            "servers that only this machine calls"
        )
    return ""


def address_problem(url: str) -> str:
    """Return the reason why ``url`` is not an address of HTTP; empty if it is."""
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and is_host(parts.hostname or "") and parts.port != 0
    except ValueError:  # not a port number
        is_one = False
    if not is_one or not url.isprintable() or " " in url:
        return f"{url[:80]!r} is not an address; expected http://host:port"
    if "@" in parts.netloc:
        # The message leaves the URL out, because logs would keep the password.
        return f"the address of {parts.hostname} has a user or a password; give the servers' key by rollout.api_key_env"
    return ""


def server_problem(url: str) -> str:
    """Return the reason why ``url`` is not the address of an SGLang server, whose paths a run adds itself; empty if it is."""
    if problem := address_problem(url):
        return problem
    parts = urlsplit(url)
    if parts.path.strip("/") or parts.query or parts.fragment:
        return f"{url[:80]!r} has a path or a query; expected http://host:port alone, because requests add their own paths"
    return ""
