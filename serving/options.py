"""HttpOptions: what an HTTP app may be told; every value has a default that suits most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve, frozen

from pipeline.errors import OVERLOADED


@frozen
class HttpOptions:
    """How one app answers.

    `silence_timeout_s`: a request whose engine says nothing for that long, and at most for twice as long, is killed;
    None waits for ever. `keep_alive_s`: comments are sent to a waiting client this often, which then has its 200 before
    the first item; None sends none. `context_window_tokens` and `max_output_tokens` override what models say.
    """

    body_limit_mb: int = 45
    nvext: bool = True
    force_usage: bool = False
    overload_status: int = OVERLOADED
    silence_timeout_s: float | None = None
    keep_alive_s: float | None = None
    context_window_tokens: int | None = None
    max_output_tokens: int | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> HttpOptions:
        """The defaults, changed by the variables of the original; what cannot be read counts as not set."""
        found: dict[str, Any] = {
            "body_limit_mb": _integer(environment.get("DYN_HTTP_BODY_LIMIT_MB"), 1, 2**20),
            "nvext": False if _is_true(environment.get("DYN_DISABLE_FRONTEND_NVEXT")) else None,
            "force_usage": True if _is_true(environment.get("DYN_ENABLE_FORCE_INCLUDE_USAGE")) else None,
            "overload_status": _integer(environment.get("DYN_HTTP_OVERLOAD_STATUS_CODE"), 200, 999),
            "silence_timeout_s": _seconds(environment.get("DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS"), 1.0),
            "keep_alive_s": _seconds(environment.get("DYN_HTTP_SSE_KEEP_ALIVE_INTERVAL_MS"), 0.001),
            "context_window_tokens": _integer(environment.get("DYN_CONTEXT_WINDOW"), 1, 2**32 - 1),
            "max_output_tokens": _integer(environment.get("DYN_MAX_OUTPUT_TOKENS"), 1, 2**32 - 1),
        }
        return evolve(cls(), **{name: value for name, value in found.items() if value is not None})


def _integer(text: str | None, low: int, high: int) -> int | None:
    text = (text or "").strip()
    return int(text) if text.isascii() and text.isdigit() and low <= int(text) <= high else None


def _seconds(text: str | None, unit_s: float) -> float | None:
    count = _integer(text, 1, 10**9)
    return None if count is None else count * unit_s


def _is_true(text: str | None) -> bool:
    return (text or "").strip().lower() in {"1", "true", "yes", "on"}
