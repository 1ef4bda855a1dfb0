"""Gate: the access options of a program, read and checked before anything is served."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from pipeline import InvalidArgument

from ..access_options import AccessOptions
from .key_file import all_keys
from .key_ring import KeyRing
from .proxies import TrustedProxies
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
