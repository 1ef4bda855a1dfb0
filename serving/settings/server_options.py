"""ServerOptions: where a server listens, what it logs, whom it admits and how much of it one client may take."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from attrs import frozen

from pipeline.protocols.limits import PromptWork, RequestLimits
from pipeline.settings import PORT, setting

from ..limits import HttpLimits

LogLevel = Literal["debug", "info", "warning", "error"]


@frozen
class ListenOptions:
    """Where a server listens."""

    group: ClassVar[str] = "Server"

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8000, "Port to listen on; 0 takes a free one.", PORT)


@frozen
class LogOptions:
    """What a program that serves logs, and how."""

    group: ClassVar[str] = "Logging"

    log_level: LogLevel = setting("warning", "Least serious messages shown.")
    log_format: Literal["text", "json"] = setting("text", "Form of messages: text, or JSON, an object a line.")
    access_log: bool = setting(False, "Log every request when its answer ends; costs speed.")


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
    """The server before a graph or a worker."""

    listen: ListenOptions
    log: LogOptions
    limits: HttpLimits
    request_limits: RequestLimits
    prompt_work: PromptWork
    access: AccessOptions

    def graph_fields(self) -> dict[str, Any]:
        """Return the fields of a GraphConfig."""
        return {"request_limits": self.request_limits, "prompt_work": self.prompt_work}
