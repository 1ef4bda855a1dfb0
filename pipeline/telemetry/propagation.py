"""The headers that carry a trace from process to process, read and written by OpenTelemetry's own propagators.

Which headers those are, `OTEL_PROPAGATORS` decides: `traceparent`, `tracestate` and `baggage` unless it is set. A
client can put anything into them, so what is longer than the limits here, or not of the header's form, is left out
before a propagator reads it: some of them log all that they refuse.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.baggage import get_all
from opentelemetry.context import Context as TraceContext
from opentelemetry.propagators.textmap import Getter, TextMapPropagator
from opentelemetry.trace import SpanContext
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pipeline.protocols import TraceLink

from ..context import Context

TRACEPARENT_LENGTH = len("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
HEADER_MAX_CHARACTERS = 512
"""Of any header but the baggage; what W3C wants to be carried of a tracestate."""
BAGGAGE_MAX_CHARACTERS = 1024

# The grammars of W3C, so that the propagators have nothing to refuse.
_STATE_KEY = r"(?:[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
_STATE = rf"{_STATE_KEY}=[ -+\--<>-~]{{0,255}}[!-+\--<>-~]"
_TRACESTATE = re.compile(rf"{_STATE}(?:[ \t]*+,[ \t]*+{_STATE}){{0,31}}")
_TOKEN, _VALUE = r"[A-Za-z0-9!#$%&'*+.^_`|~-]++", r"[!#-+\--:<-\[\]-~]*+"
_PAIR = rf"{_TOKEN}={_VALUE}(?:;{_TOKEN}(?:={_VALUE})?)*+"
_BAGGAGE = re.compile(rf"{_PAIR}(?:[ \t]*+,[ \t]*+{_PAIR}){{0,63}}")


def extract(headers: Mapping[str, str]) -> object:
    """Return the caller's span and baggage as `Context.trace` has them; None if there is neither.

    A traceparent has exactly four parts; any other is ignored as a whole, with its tracestate. Upper case is read as
    lower case. Source: dynamo lib/runtime/src/logging.rs, parse_traceparent.
    """
    known = {name.lower(): value for name, value in headers.items()}
    found = _propagator().extract(known, TraceContext(), _BOUNDED)
    return found if trace.get_current_span(found) is not trace.INVALID_SPAN or get_all(found) else None


def inject(context: Context[object]) -> dict[str, str]:
    """Return the headers that carry the stage's span and baggage to another process; empty without either."""
    headers: dict[str, str] = {}
    if isinstance(context.trace, TraceContext):
        _propagator().inject(headers, context.trace)  # pyright: ignore[reportArgumentType]  # its default setter's type
    return headers


def linked(link: TraceLink) -> SpanContext | None:
    """Return the span that the link names; None if its ids are not of hex digits."""
    header = f"00-{link.trace_id}-{link.span_id}-01"
    found = _LINKS.extract({"traceparent": header}, TraceContext(), _BOUNDED)
    ids = trace.get_current_span(found).get_span_context()
    return ids if ids.is_valid else None


class _Bounded(Getter[Mapping[str, str]]):
    """Gives a propagator only headers that are well formed and not too long."""

    def get(self, carrier: Mapping[str, str], key: str) -> list[str] | None:
        text = carrier.get(key.lower(), "").strip()
        if key == "traceparent":
            text = text.lower()
            is_good = len(text) == TRACEPARENT_LENGTH and text.isascii()
        elif key == "tracestate":
            is_good = len(text) <= HEADER_MAX_CHARACTERS and _TRACESTATE.fullmatch(text) is not None
        elif key == "baggage":
            is_good = len(text) <= BAGGAGE_MAX_CHARACTERS and _BAGGAGE.fullmatch(text) is not None
        else:
            is_good = 0 < len(text) <= HEADER_MAX_CHARACTERS
        return [text] if is_good else None

    def keys(self, carrier: Mapping[str, str]) -> list[str]:
        return list(carrier)


_BOUNDED = _Bounded()
_LINKS = TraceContextTextMapPropagator()


def _propagator() -> TextMapPropagator:
    """Return the propagator in use, loaded at the first call: that reads the environment and may fail."""
    from opentelemetry.propagate import get_global_textmap

    return get_global_textmap()
