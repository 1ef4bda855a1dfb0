"""Gate: the access options of a program, read and checked before anything is served.

TrustedProxies: the proxies whose headers name the client's address.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable, Container, Mapping, Sequence
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Any

from pipeline import InvalidArgument

from ..settings import AccessOptions
from .key_ring import KeyRing
from .keys import all_keys
from .tls import tls_of
from .watched_file import WatchedFiles, follow

_log = logging.getLogger(__name__)

_ORIGIN = re.compile(r"\*|https?://[^/\s@?#*]+")
_LAST_PORT = 2**16 - 1


class Gate:
    """The keys, the certificate, the trusted proxies and the CORS origins of a server; each is None or empty if unset.

    Raise InvalidArgument that names the option for an invalid value.
    """

    def __init__(self, options: AccessOptions, environment: Mapping[str, str]) -> None:
        self._options = options
        self._watched: list[WatchedFiles] = []
        self.keys = self._key_ring(options.api_keys, environment)
        self.tls = tls_of(options.tls_cert_path, options.tls_key_path)
        if self.tls is not None:
            self._watched.append(self.tls.watched)
        self.proxies = TrustedProxies(options.trusted_proxy)
        self.cors_origins = _origins(options.cors_origin)
        if options.admin_port is not None and not 0 <= options.admin_port <= _LAST_PORT:
            raise InvalidArgument(f"must be between 0 and {_LAST_PORT}, got {options.admin_port}", field="admin_port")

    def _key_ring(self, path: Path | None, environment: Mapping[str, str]) -> KeyRing | None:
        def load() -> Callable[[], object]:
            changed = all_keys(path, environment)
            return lambda: ring.replace(changed)

        watched = None if path is None else WatchedFiles("API keys", [path], load)  # before the file is read
        if not (keys := all_keys(path, environment)):
            return None
        ring = KeyRing(keys)
        if watched is not None:
            self._watched.append(watched)
        return ring

    async def follow(self) -> None:
        """Reload the files of keys and certificates when they change, until cancelled."""
        await follow(self._watched)

    def shows_internals(self, listener: socket.socket) -> bool:
        """Return whether metrics and the state of workers are shown on the public address.

        They are shown on a loopback address that no proxy makes public, and if the admin address is the server's own.
        """
        if self._options.admin_port is None:
            return not self._is_public(listener)
        return self._is_on(listener)

    def admin_address(self, listener: socket.socket) -> tuple[str, int] | None:
        """Return the host and port of the admin server, None if no server of its own is wanted."""
        if (port := self._options.admin_port) is None or self._is_on(listener):
            return None
        return self._options.admin_host, port

    def _is_on(self, listener: socket.socket) -> bool:
        host, port = listener.getsockname()[:2]
        return (self._options.admin_host, self._options.admin_port) == (host, port)

    def _is_public(self, listener: socket.socket) -> bool:
        return bool(self.proxies) or not is_loopback(listener)

    def warn(self, listener: socket.socket) -> None:
        """Log a warning for each protection that a server at this address lacks."""
        if not self._is_public(listener):
            return
        host = listener.getsockname()[0]
        if self.keys is None:
            _log.warning("%s can be reached from outside and no API keys are set: every client may use it", host)
        elif self.tls is None and not self.proxies:
            _log.warning("%s can be reached from outside without TLS: API keys can be read on their way", host)
        if self._options.admin_port is None:
            _log.warning("metrics are not shown on an address that can be reached from outside: set --admin-port")


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
        raise InvalidArgument(f"is no address or network: {error}", field="trusted_proxy") from error
    if network.prefixlen == 0:
        raise InvalidArgument(f"{text} holds every address: each client could choose its own", field="trusted_proxy")
    if isinstance(network, IPv4Network):
        return [str(network), f"::ffff:{network.network_address}/{96 + network.prefixlen}"]
    return [str(network)]


def _headers_of(application: Any, networks: list[str]) -> Any:
    from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware  # unused by an app without proxies

    return ProxyHeadersMiddleware(application, networks)


def is_loopback(listener: socket.socket) -> bool:
    """Return whether only this machine can connect to the listener."""
    if listener.family not in (socket.AF_INET, socket.AF_INET6):
        return True
    address = ip_address(listener.getsockname()[0].partition("%")[0])
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


def _origins(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the origins in the form that browsers send. Raise InvalidArgument for an invalid one."""
    for text in texts:
        if _ORIGIN.fullmatch(text) is None:
            raise InvalidArgument(f"{text!r} is no origin: `https://HOST[:PORT]`, or `*` for all", field="cors_origin")
    return tuple(text.lower() for text in texts)
