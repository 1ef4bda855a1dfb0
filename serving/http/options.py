"""HttpOptions: what an HTTP app may be told; every value has a default that suits most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve, frozen

from pipeline.errors import OVERLOADED
from pipeline.protocols.limits import RequestLimits

from ..environment import integer, is_true, path, seconds
from ..limits import HttpLimits

BODY_LIMIT = "DYN_HTTP_BODY_LIMIT_MB"


@frozen
class HttpOptions:
    """How one app answers.

    A request whose engine gives nothing for `silence_timeout_s` is killed, at most a quarter later; None leaves that to
    the limit of this name in `limits`.
    `keep_alive_s`: comments are sent to a waiting client this often, which then has its 200 before the first item; None
    sends none. `context_window_tokens` and `max_output_tokens` override what models say. `limits` bound what requests,
    connections and clients may take, `request_limits` what may be in a request. `shows_internals`: whether metrics and
    the workers behind `/health` are shown, to keys with the privilege `admin` where there are keys. With
    `shows_workers` the headers of answers name the workers and why they were chosen; without it, `nvext` does not show
    them either. `access_log` writes a message for each request to the logger `serving.access`.
    """

    body_limit_mb: int = 45
    nvext: bool = True
    force_usage: bool = False
    overload_status: int = OVERLOADED
    silence_timeout_s: float | None = None
    keep_alive_s: float | None = None
    context_window_tokens: int | None = None
    max_output_tokens: int | None = None
    chat_path: str = "/v1/chat/completions"
    completions_path: str = "/v1/completions"
    models_path: str = "/v1/models"
    health_path: str = "/health"
    live_path: str = "/live"
    metrics_path: str = "/metrics"
    openapi_path: str = "/openapi.json"
    docs_path: str = "/docs"
    limits: HttpLimits = HttpLimits()
    request_limits: RequestLimits = RequestLimits()
    shows_internals: bool = True
    shows_workers: bool = True
    access_log: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> HttpOptions:
        """The defaults, changed by the variables of the original; what cannot be read counts as not set."""
        found: dict[str, Any] = {
            "body_limit_mb": integer(environment.get(BODY_LIMIT), 1, 2**20),
            "nvext": False if is_true(environment.get("DYN_DISABLE_FRONTEND_NVEXT")) else None,
            "force_usage": True if is_true(environment.get("DYN_ENABLE_FORCE_INCLUDE_USAGE")) else None,
            "shows_workers": False if is_true(environment.get("PENSTOCK_HIDE_WORKERS")) else None,
            "overload_status": integer(environment.get("DYN_HTTP_OVERLOAD_STATUS_CODE"), 200, 599),
            # Doubled: whoever sends to workers gives up after the time in the variable, and is to be first.
            "silence_timeout_s": seconds(environment.get("DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS"), 2.0),
            "keep_alive_s": seconds(environment.get("DYN_HTTP_SSE_KEEP_ALIVE_INTERVAL_MS"), 0.001),
            "context_window_tokens": integer(environment.get("DYN_CONTEXT_WINDOW"), 1, 2**32 - 1),
            "max_output_tokens": integer(environment.get("DYN_MAX_OUTPUT_TOKENS"), 1, 2**32 - 1),
        }
        found |= {field: path(environment.get(f"DYN_HTTP_SVC_{name}_PATH")) for field, name in _PATHS.items()}
        return evolve(cls(), **{name: value for name, value in found.items() if value is not None})


_PATHS = {
    "chat_path": "CHAT",
    "completions_path": "CMP",
    "models_path": "MODELS",
    "health_path": "HEALTH",
    "live_path": "LIVE",
    "metrics_path": "METRICS",
    "openapi_path": "OPENAPI",
    "docs_path": "DOCS",
}
