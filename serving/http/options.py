"""HttpOptions: the options of an HTTP app, each with a default."""

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
    """How one app answers."""

    body_limit_mb: int = 45
    """Megabytes of a body at most; a longer one is refused with 413."""
    nvext: bool = True
    """Whether the request extension `nvext` and its headers are read; without it they are ignored."""
    force_usage: bool = False
    """Whether every stream ends with its usage, as if the client had wanted it."""
    overload_status: int = OVERLOADED
    """Status of a refusal by overload."""
    silence_timeout_s: float | None = None
    """Seconds without an item of the engine after which a request is killed, at most a quarter later.

    None: the limit of this name in `limits`.
    """
    keep_alive_s: float | None = None
    """Seconds between comments to a waiting client, which then has its 200 before the first item; None: no comments."""
    context_window_tokens: int | None = None
    """Overrides the context length of every model in the list of models."""
    max_output_tokens: int | None = None
    """Tokens of an answer at most, in the list of models."""
    chat_path: str = "/v1/chat/completions"
    completions_path: str = "/v1/completions"
    models_path: str = "/v1/models"
    health_path: str = "/health"
    live_path: str = "/live"
    metrics_path: str = "/metrics"
    openapi_path: str = "/openapi.json"
    docs_path: str = "/docs"
    limits: HttpLimits = HttpLimits()
    """Bounds of requests, connections and clients."""
    request_limits: RequestLimits = RequestLimits()
    """Bounds of the fields of a request."""
    shows_internals: bool = True
    """Whether metrics and the workers in `/health` are shown; where keys are set, to keys with `admin`."""
    shows_workers: bool = True
    """Whether the headers of answers name the workers and the reason for the choice; if not, `nvext` hides them too."""
    access_log: bool = False
    """Whether each request is logged to the logger `serving.access`."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> HttpOptions:
        """Return the defaults, changed by the variables of NVIDIA Dynamo; an invalid value counts as unset."""
        found: dict[str, Any] = {
            "body_limit_mb": integer(environment.get(BODY_LIMIT), 1, 2**20),
            "nvext": False if is_true(environment.get("DYN_DISABLE_FRONTEND_NVEXT")) else None,
            "force_usage": True if is_true(environment.get("DYN_ENABLE_FORCE_INCLUDE_USAGE")) else None,
            "shows_workers": False if is_true(environment.get("PENSTOCK_HIDE_WORKERS")) else None,
            "overload_status": integer(environment.get("DYN_HTTP_OVERLOAD_STATUS_CODE"), 200, 599),
            # Doubled: a router gives up on its worker after the time in the variable, and should be first.
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
