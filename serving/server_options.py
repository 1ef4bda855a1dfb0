"""ServerOptions: how a program's server behaves, beside the graph it serves; AccessOptions: who may use it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from attrs import frozen

from pipeline.settings import PORT, setting

from .limits import HttpLimits

if TYPE_CHECKING:
    from pipeline.telemetry import Tracer


@frozen
class AccessOptions:
    """What is off by default is off because a server on a loopback address needs none of it. No field is a secret."""

    group: ClassVar[str] = "Access"

    api_keys: Path | None = setting(
        None,
        "File of the keys that requests must have, as TOML; without keys all are taken.",
        variable="PENSTOCK_API_KEYS_FILE",
    )
    tls_cert_path: Path | None = setting(
        None, "Certificate chain as PEM; with it the server serves TLS only.", variable="DYN_TLS_CERT_PATH"
    )
    tls_key_path: Path | None = setting(
        None, "Private key of the certificate as PEM, without a passphrase.", variable="DYN_TLS_KEY_PATH"
    )
    cors_origin: tuple[str, ...] = setting(
        (), "Origin whose pages may call the server from a browser; repeatable.", separator=","
    )
    trusted_proxy: tuple[str, ...] = setting(
        (), "Address or network of a proxy that sets X-Forwarded-For; repeatable.", separator=","
    )
    admin_host: str = setting("127.0.0.1", "Address where metrics and the state of workers are shown.")
    admin_port: int | None = setting(None, "Port there; the server's own address shows them on it.", PORT)


@frozen
class ServerOptions:
    """What the options of a command that serves come to."""

    limits: HttpLimits = HttpLimits()
    """Bounds of requests, connections and clients."""
    access_log: bool = False
    """Whether every request is logged."""
    access: AccessOptions = AccessOptions()
    tracer: Tracer | None = None
    """Makes the spans of requests; None: there are none."""
