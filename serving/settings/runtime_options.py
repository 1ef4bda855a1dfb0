"""The options of programs that find each other in a runtime, and of those that start several processes."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from attrs import frozen

from pipeline import InvalidArgument
from pipeline.settings import at_least, setting

RUNTIME_TOKEN = "PENSTOCK_RUNTIME_TOKEN"
"""Variable with the token that the processes of a deployment share: options are seen in lists of processes."""

_HERE = "memory"


@frozen
class RuntimeOptions:
    """Where the processes of a deployment find each other, and how they speak."""

    group: ClassVar[str] = "Runtime"

    runtime: str | None = setting(
        None,
        "Where processes find each other: file:DIR, a folder they share, or nats://HOST:PORT, several with commas,"
        " ?replicas=3 for a cluster of them.",
        metavar="URL",
    )
    runtime_host: str | None = setting(
        None, "Address to take requests of other processes at, and to announce to them. [default: 127.0.0.1]"
    )
    runtime_tls_cert: Path | None = setting(
        None, "Certificate chain of this process as PEM; with it processes speak TLS with each other."
    )
    runtime_tls_key: Path | None = setting(None, "Private key of that certificate as PEM.")
    runtime_tls_ca: Path | None = setting(
        None, "Certificates of the authorities as PEM; the certificate of each process must be of one of them."
    )

    @property
    def url(self) -> str | None:
        """The runtime that other processes see; None: this process is alone.

        Raise InvalidArgument that names the option for options that do not go together.
        """
        if self.runtime is None or self.runtime == _HERE:
            for name in ("runtime_host", "runtime_tls_cert", "runtime_tls_key", "runtime_tls_ca"):
                if getattr(self, name) is not None:
                    raise InvalidArgument("goes with --runtime", field=name)
            return None
        if (self.runtime_tls_cert is None) != (self.runtime_tls_key is None):
            name = "runtime_tls_key" if self.runtime_tls_key is None else "runtime_tls_cert"
            raise InvalidArgument("a certificate and its key are given together", field=name)
        if self.runtime_tls_ca is not None and self.runtime_tls_cert is None:
            raise InvalidArgument("goes with --runtime-tls-cert", field="runtime_tls_ca")
        return self.runtime


@frozen
class FrontendOptions:
    """Which workers a server uses, and how many processes it has."""

    group: ClassVar[str] = "Runtime"

    namespace: str | None = setting(
        None,
        "Namespace whose workers are used, with those that begin with it and a hyphen. [default: all]",
        variable="DYN_NAMESPACE",
    )
    processes: int = setting(
        1, "Number of front ends behind the port; with more than 1 each worker has a process too.", at_least(1)
    )


@frozen
class UpOptions:
    """The processes of a deployment on one machine, beside its workers."""

    group: ClassVar[str] = "Runtime"

    frontends: int = setting(1, "Number of front ends behind the port.", at_least(1))
    broker: Literal["file", "nats"] = setting(
        "file",
        "How the processes find each other, without --runtime: by files in a fresh folder, or by a nats-server that is"
        " started too.",
    )


@frozen
class StatusOptions:
    """How the state of a deployment is shown."""

    group: ClassVar[str] = "Options"

    watch: bool = setting(
        False, "Show it again whenever it has changed, until interrupted.", variable="", has_negative=False
    )
    json: bool = setting(False, "Print it as JSON, one object in a line.", variable="", has_negative=False)
    wait_s: float = setting(1.0, "Seconds in which reports of the workers are awaited.", variable="")
