"""TrustedProxies: the proxies whose headers name the client's address."""

from __future__ import annotations

from collections.abc import Container, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any

from pipeline import InvalidArgument

FIELD = "trusted_proxy"


class TrustedProxies:
    """Networks of proxies that set X-Forwarded-For and X-Forwarded-Proto; the headers of other peers are ignored.

    Raise InvalidArgument for a text that is not a network or address, and for a network of all addresses: every client
    could choose its own address.
    """

    def __init__(self, networks: Sequence[str] = ()) -> None:
        self._networks = [each for text in networks for each in _networks(text)]
        self._known: Container[str] = _headers_of(None, self._networks).trusted_hosts if self._networks else ()

    def __bool__(self) -> bool:
        return bool(self._networks)

    def trusted(self, address: str) -> bool:
        """Return whether this address is a trusted proxy's."""
        return address in self._known

    def around(self, application: Any) -> Any:
        """Return the application behind a middleware that sets the client's own address and scheme.

        In X-Forwarded-For the last address that is not a trusted proxy's counts: addresses that the client itself put
        into the header stand before it.
        """
        return _headers_of(application, self._networks)


def _networks(text: str) -> list[str]:
    """Return the network, and for IPv4 also its form on a socket for both families."""
    try:
        network: IPv4Network | IPv6Network = ip_network(text)
    except ValueError as error:
        raise InvalidArgument(f"is no address or network: {error}", field=FIELD) from error
    if network.prefixlen == 0:
        raise InvalidArgument(f"{text} holds every address: each client could choose its own", field=FIELD)
    if isinstance(network, IPv4Network):
        return [str(network), f"::ffff:{network.network_address}/{96 + network.prefixlen}"]
    return [str(network)]


def _headers_of(application: Any, networks: list[str]) -> Any:
    from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware  # unused by an app without proxies

    return ProxyHeadersMiddleware(application, networks)
