"""HttpOptions: the options of an HTTP app, each with a default."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from pipeline.errors import OVERLOADED
from pipeline.protocols.limits import RequestLimits
from pipeline.settings import by_variable, from_environment, switch, url_path, whole

from ..limits import HttpLimits


def _off(text: str) -> bool:
    return not switch(text)


def _path(default: str, name: str) -> str:
    variable = f"DYN_HTTP_SVC_{name}_PATH"
    return by_variable(default, "Path of this route.", variable, url_path)


@frozen
class HttpOptions:
    """How one app answers."""

    body_limit_mb: int = by_variable(
        45, "Megabytes of a body; a larger one gets 413.", "DYN_HTTP_BODY_LIMIT_MB", whole(1, 2**20)
    )
    nvext: bool = by_variable(
        True, "1 drops the field `nvext` of requests and answers.", "DYN_DISABLE_FRONTEND_NVEXT", _off
    )
    """Whether the request extension `nvext` and its headers are read; without it they are ignored."""
    force_usage: bool = by_variable(False, "1 puts usage into every stream.", "DYN_ENABLE_FORCE_INCLUDE_USAGE", switch)
    overload_status: int = by_variable(
        OVERLOADED, "HTTP status of a refusal because of overload.", "DYN_HTTP_OVERLOAD_STATUS_CODE", whole(200, 599)
    )
    silence_timeout_s: float | None = by_variable(
        None,
        "Half the seconds without an item after which a request fails.",
        "DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS",
        whole(1, 10**9, unit=2.0),
    )
    """Seconds without an item of the engine after which a request is killed, at most a quarter later.

    None: the limit of this name in `limits`. Twice the variable: the router gives up on its worker first.
    """
    keep_alive_s: float | None = by_variable(
        None,
        "Milliseconds between comments to a waiting client, which then has its 200 before the first item.",
        "DYN_HTTP_SSE_KEEP_ALIVE_INTERVAL_MS",
        whole(1, 10**9, unit=0.001),
    )
    context_window_tokens: int | None = by_variable(
        None, "Context window in `/v1/models`; by default the model's.", "DYN_CONTEXT_WINDOW", whole(1, 2**32 - 1)
    )
    max_output_tokens: int | None = by_variable(
        None,
        "Most output tokens in `/v1/models`; by default the model's.",
        "DYN_MAX_OUTPUT_TOKENS",
        whole(1, 2**32 - 1),
    )
    chat_path: str = _path("/v1/chat/completions", "CHAT")
    completions_path: str = _path("/v1/completions", "CMP")
    models_path: str = _path("/v1/models", "MODELS")
    health_path: str = _path("/health", "HEALTH")
    live_path: str = _path("/live", "LIVE")
    metrics_path: str = _path("/metrics", "METRICS")
    openapi_path: str = _path("/openapi.json", "OPENAPI")
    docs_path: str = _path("/docs", "DOCS")
    limits: HttpLimits = HttpLimits()
    """Bounds of requests, connections and clients."""
    request_limits: RequestLimits = RequestLimits()
    """Bounds of the fields of a request."""
    shows_internals: bool = True
    """Whether metrics and the workers in `/health` are shown; where keys are set, to keys with `admin`."""
    shows_workers: bool = by_variable(
        True, "1 hides from clients which workers answered, and why.", "PENSTOCK_HIDE_WORKERS", _off
    )
    """Whether the headers of answers name the workers and the reason for the choice; if not, `nvext` hides them too."""
    access_log: bool = False
    """Whether each request is logged to the logger `serving.access`."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> HttpOptions:
        """Return the defaults, changed by the variables; one that cannot be read counts as not set."""
        return cls(**from_environment(cls, environment))
