"""What the address of a Spark master says: where tasks run, and whether they can reach this machine's loopback."""

from __future__ import annotations

import ipaddress
import re


def is_local(master: str) -> bool:
    """Whether tasks run in the driver's own process, and so see what it sees."""
    return master.startswith("local") and not master.startswith("local-cluster")


def reaches_loopback(master: str) -> bool:
    """Whether executors run on this machine: the master is `local…`, or a standalone one at a loopback address."""
    if master.startswith("local"):
        return True
    found = re.match(r"spark://(\[[^]]*\]|[^:,/]*)", master)
    if found is None:
        return False
    host = found[1].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
