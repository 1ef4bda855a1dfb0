"""The runtime of a program, from its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline import InvalidArgument
from pipeline.network import Runtime

from .settings import RUNTIME_TOKEN, RuntimeOptions

if TYPE_CHECKING:
    from pipeline.telemetry import Metrics


_OPTION_OF = {
    "url": "runtime",
    "host": "runtime_host",
    "announced_host": "runtime_host",
    "token": RUNTIME_TOKEN,
    "tls_cert_path": "runtime_tls_cert",
    "tls_key_path": "runtime_tls_key",
    "tls_ca_path": "runtime_tls_ca",
}
"""Fields of errors of the runtime -> the settings behind them."""


def runtime_of(
    options: RuntimeOptions, environment: Mapping[str, str], *, metrics: Metrics | None = None, may_make: bool = True
) -> Runtime:
    """Return the runtime at the URL of the options, not open; without one that of this process alone.

    `may_make`: whether a folder that is not there is made; False for a process that only looks.
    Raise InvalidArgument that names the option.
    """
    if (url := options.url) is None:
        return Runtime.in_process(metrics=metrics)
    from pipeline.network.tcp import TcpOptions

    try:
        given: dict[str, Any] = {"host": options.runtime_host, "token": environment.get(RUNTIME_TOKEN, "").strip()}
        given |= {"tls_cert_path": options.runtime_tls_cert, "tls_key_path": options.runtime_tls_key}
        given |= {"tls_ca_path": options.runtime_tls_ca}
        tcp = TcpOptions(**{name: value for name, value in given.items() if value})
        return Runtime.at(url, tcp=tcp, metrics=metrics, may_make=may_make)
    except InvalidArgument as error:
        raise InvalidArgument(str(error), field=_OPTION_OF.get(error.field or "", error.field)) from error
