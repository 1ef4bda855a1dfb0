"""NatsOptions, and the addresses of servers. Secrets appear in no text that these return."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from attrs import field, frozen

from pipeline import InvalidArgument

DEFAULT_PORT = 4222
LOST_AFTER_HEARTBEATS = 4
"""A server that has not answered for so many heartbeats is lost."""


@frozen
class NatsOptions:
    """How to reach and to authenticate with a server, and how long to wait for it."""

    token: str | None = field(default=None, repr=False)
    """Of a deployment in which all clients have the same. Without one, that of the address holds."""
    user: str | None = None
    """Of a server with users. Without one, that of the address holds."""
    password: str | None = field(default=None, repr=False)
    """The user's."""
    credentials_file: Path | None = None
    """A `.creds` file with the user's JWT and seed; needs the package `nkeys`."""
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    """Encrypt, with these certificates. `tls://` addresses use the system's without it."""
    name: str = "penstock"
    """The client's name in the server's monitoring."""
    connect_timeout_s: float = 5.0
    """Time for the first connection, over all addresses; also the longest that one later attempt takes."""
    call_timeout_s: float = 5.0
    """Time for one call, which includes waiting for a connection."""
    heartbeat_s: float = 1.0
    """Time between two pings. A connection is lost after four without an answer."""
    reconnect_min_s: float = 0.05
    """The first pause between two attempts to connect again; each is twice the one before, at random up to this."""
    reconnect_max_s: float = 2.0
    """The longest such pause."""

    def __attrs_post_init__(self) -> None:
        for name in ("connect_timeout_s", "call_timeout_s", "heartbeat_s", "reconnect_min_s", "reconnect_max_s"):
            if not getattr(self, name) > 0:
                raise InvalidArgument(f"{name} must be above 0", field=name)

    @property
    def lost_after_s(self) -> float:
        """Time without an answer after which a connection is lost."""
        return LOST_AFTER_HEARTBEATS * self.heartbeat_s


@frozen
class ServerAddress:
    """One server, and what its address held for the login."""

    host: str
    port: int
    is_tls: bool = False
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.is_tls else 'nats'}://{host}:{self.port}"


def parse_addresses(urls: str | Iterable[str]) -> tuple[ServerAddress, ...]:
    """Return the servers of `nats://host:port[,host:port]`, or of several such texts.

    `tls://` encrypts, `user:password@` and `token@` before the host are for the login, the port is 4222 if it is left
    out. A server without scheme has that of the one before. Raise InvalidArgument, without the text, for anything else.
    """
    found: list[ServerAddress] = []
    for text in [urls] if isinstance(urls, str) else urls:
        scheme = "nats"
        for part in text.split(","):
            if "://" in part:
                scheme = part.partition("://")[0].strip().lower()
            found.append(_address(scheme, part.rpartition("://")[2].strip()))
    if not found:
        raise InvalidArgument("there is no address of a NATS server", field="url")
    return tuple(found)


def parse_replicas(url: str) -> tuple[str, int]:
    """Return the addresses in `nats://one,two,three?replicas=3`, and how many servers keep what is stored.

    That is 1 unless given. Raise InvalidArgument, without the text, for another query or number than 1, 3 and 5.
    """
    addresses, _, query = url.partition("?")
    if not query:
        return addresses, 1
    name, _, number = query.partition("=")
    if name != "replicas" or number not in ("1", "3", "5"):
        raise InvalidArgument("behind the addresses of NATS servers may stand ?replicas=1, 3 or 5", field="url")
    return addresses, int(number)


def _address(scheme: str, rest: str) -> ServerAddress:
    try:
        parts = urlsplit(f"//{rest}")
        host, port = parts.hostname, parts.port
        is_more = bool(parts.path.strip("/") or parts.query or parts.fragment)
    except ValueError:
        raise _no_address() from None  # its text and its cause may hold the login
    if scheme not in ("nats", "tls") or not host or is_more:
        raise _no_address()
    user, password = parts.username, parts.password
    return ServerAddress(
        host,
        port or DEFAULT_PORT,
        scheme == "tls",
        user=unquote(user) if user and password is not None else None,
        password=unquote(password) if password is not None else None,
        token=unquote(user) if user and password is None else None,
    )


def _no_address() -> InvalidArgument:
    return InvalidArgument("the address of a NATS server is nats://host:port or tls://host:port", field="url")
