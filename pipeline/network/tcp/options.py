"""TcpOptions: where a request plane over sockets listens, with whom it speaks, and its limits."""

from __future__ import annotations

from pathlib import Path

from attrs import field, frozen

from pipeline import InvalidArgument

MIB = 1024 * 1024
_WILDCARDS = ("", "0.0.0.0", "::", "*")


@frozen
class TcpOptions:
    """Options of a `TcpRequestPlane`. Raise InvalidArgument for values that do not go together."""

    host: str = "127.0.0.1"
    """Address to listen on, and to announce unless `announced_host` is set."""
    port: int = 0
    """Port to listen on; 0: one that is free."""
    announced_host: str = ""
    """Address under which other machines reach this one; needed if `host` stands for all addresses."""
    has_unix_socket: bool = True
    """Whether to listen on a unix socket too, for callers on the same machine."""
    token: str = field(default="", repr=False)
    """Secret that both sides of a connection must know. It is never sent."""
    tls_cert_path: Path | None = None
    """PEM file with the certificate chain of this process; TLS is on if it is set."""
    tls_key_path: Path | None = None
    """PEM file with its private key."""
    tls_ca_path: Path | None = None
    """PEM file with certificates of authorities. If set, both sides must have a certificate of one of them; else the
    caller checks the other side's with the authorities of the system, and its host name."""
    connect_timeout_s: float = 5.0
    """Seconds for a connection to be made, its first frames included."""
    heartbeat_s: float = 5.0
    """Seconds in which each side sends something, if only that it is there."""
    lost_after_s: float = 15.0
    """Seconds of silence after which a connection is lost; at least three heartbeats of the other side."""
    message_limit_bytes: int = 64 * MIB
    """Bytes of a request or an item, encoded."""
    window_items: int = 256
    """Items of a stream that may be under way to its reader, unread."""
    window_bytes: int = MIB
    """Bytes of such items; one item may exceed it."""
    join_max_tokens: int = 64
    """Tokens of one choice that wait for a slow reader and become one item, at most; 1: each item stays as it came."""
    calls_max: int = 16_384
    """Calls that one connection may have open; more are refused with WorkerOverloaded."""
    close_timeout_s: float = 1.0
    """Seconds for what is left to be sent when the plane is closed."""

    def __attrs_post_init__(self) -> None:
        if self.host in _WILDCARDS and not self.announced_host:
            raise InvalidArgument(
                f"listening on {self.host!r}, which is no address to connect to: set the one to announce",
                field="announced_host",
            )
        if (self.tls_cert_path is None) != (self.tls_key_path is None):
            raise InvalidArgument("a certificate and its key are given together", field="tls_key_path")
        if self.tls_ca_path is not None and self.tls_cert_path is None:
            raise InvalidArgument("with authorities this process needs a certificate, too", field="tls_cert_path")
        for name in ("window_items", "window_bytes", "join_max_tokens", "calls_max", "message_limit_bytes"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"must be at least 1, got {getattr(self, name)}", field=name)
        for name in ("connect_timeout_s", "heartbeat_s"):
            if getattr(self, name) <= 0:
                raise InvalidArgument(f"must be more than 0, got {getattr(self, name)}", field=name)
        if self.lost_after_s <= self.heartbeat_s:
            raise InvalidArgument("must be longer than heartbeat_s", field="lost_after_s")
