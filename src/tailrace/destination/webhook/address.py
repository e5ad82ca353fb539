"""Where requests go: the parts of the URL, and which addresses its host name may resolve to.

The name is resolved and its addresses are checked; the connection then goes to an address that was checked, never to
the result of a second look-up. So the owner of the name cannot direct our requests to hosts in our own network.
"""

from __future__ import annotations

import base64
import ipaddress
import socket
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from tailrace.errors import PreflightError, UnavailableError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


@dataclass(frozen=True)
class WebhookTarget:
    """An HTTP(S) URL in parts. Only scheme, host and port ever show: path, query and login may be secret."""

    scheme: str
    host: str
    port: int
    path: str = field(repr=False)
    authorization: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, url: str) -> WebhookTarget:
        """Raises ValueError, without quoting the URL, for one that cannot be used."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            raise ValueError("is not a URL such as https://example.com/hook") from None
        if parts.scheme not in _PORTS or not host or not url.isascii() or not url.isprintable() or " " in url:
            raise ValueError("must be a URL such as https://example.com/hook, in ASCII and without spaces")
        authorization = None
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            authorization = "Basic " + base64.b64encode(login.encode()).decode()
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return cls(parts.scheme, host, port or _PORTS[parts.scheme], path, authorization)

    @property
    def authority(self) -> str:
        """Host and port as the Host header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def shown(self) -> str:
        """The parts of it that may be shown."""
        return f"{self.scheme}://{self.authority}"

    def addresses(self, *, allow_private: bool) -> list[str]:
        """Where to connect to, in the resolver's order, all of them allowed.

        Raises UnavailableError when the name has no address now, PreflightError when none of them is allowed.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise UnavailableError(
                f"the name {self.host} has no address", fix="check destination.url and the machine's name service"
            ) from None
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        allowed = [text for text in addresses if allow_private or is_public(text)]
        if not allowed:
            raise PreflightError(
                f"{self.host} resolves to {', '.join(addresses)}, which is not a public address",
                fix="send to a public endpoint, or set `allow_private: true` in `destination`",
            )
        return allowed


def is_public(text: str) -> bool:
    """Whether an address is public, in whatever IPv6 form an IPv4 address is written."""
    try:
        address: Address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        inner = _embedded(address)
        if inner is not None:
            address = inner
        elif address.is_site_local:
            return False
    return address.is_global and not (
        address.is_multicast
        or address.is_reserved
        or address.is_loopback
        or address.is_link_local
        or address.is_unspecified
    )


def _embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    if address.teredo is not None:
        return address.teredo[1]
    if address in _NAT64:
        return ipaddress.IPv4Address(address.packed[-4:])
    return address.ipv4_mapped or address.sixtofour
