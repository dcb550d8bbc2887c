"""Addresses of this machine, and the network interface of gloo and NCCL.

By default gloo takes the address that a node's own name resolves to. On Debian and in containers that is often a
loopback address, and ranks on several nodes never connect.
"""

import ipaddress
import os
import socket
from contextlib import closing

import psutil

LOOPBACK = "127.0.0.1"
_ANY_PORT = 9  # of a datagram that is never sent


def address_facing(host: str) -> str:
    """Return the address of this machine from which packets to a host leave.

    Raises:
        OSError: the host has no address, or there is no way to it.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with closing(socket.socket(family, kind, protocol)) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def is_loopback(address: str) -> bool:
    """Return True if only this machine can reach an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_variables(own: str) -> dict[str, str]:
    """Return the variables that name the interface with an address of this machine to gloo and NCCL.

    Those that are in the environment stay.
    """
    interfaces = {name: [each.address for each in those] for name, those in psutil.net_if_addrs().items()}
    name = next((name for name, addresses in interfaces.items() if own in addresses), None)
    # Without "=" NCCL takes the name as a prefix.
    found = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name is not None else {}
    return {variable: value for variable, value in found.items() if variable not in os.environ}
