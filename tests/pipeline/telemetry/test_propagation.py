"""Headers that carry a trace: which are read, which are left out, and that hostile ones cost nothing."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import baggage, propagate
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pipeline import Context
from pipeline.protocols import TraceLink
from pipeline.telemetry import extract, inject, linked
from pipeline.telemetry.propagation import BAGGAGE_MAX_CHARACTERS, HEADER_MAX_CHARACTERS

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def again(headers: dict[str, str]) -> dict[str, str]:
    """What goes out of what has come in."""
    context: Context[None] = Context(None)
    context.trace = extract(headers)
    return inject(context)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tracestate", "vendor=value"),
        ("tracestate", "a=1,tenant@system=2"),
        ("tracestate", f"a={'v' * 256},b={'v' * 200}"),
        ("baggage", "user=7"),
        ("baggage", ",".join(f"k{number}=v{number}" for number in range(64))),
    ],
)
def test_what_is_well_formed_goes_on(name: str, text: str) -> None:
    headers = {"traceparent": TRACEPARENT, name: text}
    assert again(headers) == headers


def test_blanks_and_properties_of_baggage_are_read() -> None:
    found: Any = extract({"baggage": "a=1 , b=%20x;secret;level=2"})
    assert baggage.get_all(found)["a"] == "1"
    assert set(baggage.get_all(found)) == {"a", "b"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tracestate", f"a={'v' * HEADER_MAX_CHARACTERS}"),
        ("tracestate", ",".join(f"k{number}=1" for number in range(33))),
        ("tracestate", "Capital=1"),
        ("tracestate", "1a=1"),
        ("tracestate", "," * 100),
        ("tracestate", "a=b=c"),
        ("baggage", f"a={'v' * BAGGAGE_MAX_CHARACTERS}"),
        ("baggage", ",".join(f"k{number}=1" for number in range(65))),
        ("baggage", "," * 100),
        ("baggage", "no pair"),
        ("baggage", "a=\x00"),
        ("baggage", "a=é"),
    ],
)
def test_what_is_too_long_or_malformed_is_left_out_and_not_logged(
    name: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert again({"traceparent": TRACEPARENT, name: text}) == {"traceparent": TRACEPARENT}
    assert caplog.text == ""


HOSTILE = st.text(alphabet=st.sampled_from('ab1,=;% \t@-_*/"\\\x00é'), max_size=600) | st.text(max_size=600)


@given(HOSTILE, HOSTILE, HOSTILE)
def test_no_text_makes_a_propagator_log(traceparent: str, tracestate: str, bag: str) -> None:
    """It would be a line of a client's own in the log for each request, of up to 8 KB."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("opentelemetry")
    log.addHandler(handler)
    try:
        for parent in (traceparent, TRACEPARENT):
            extract({"traceparent": parent, "tracestate": tracestate, "baggage": bag})
    finally:
        log.removeHandler(handler)
    assert lines == []


def test_baggage_goes_on_without_a_span() -> None:
    assert again({"baggage": "a=1"}) == {"baggage": "a=1"}
    assert extract({"baggage": "no pair"}) is None


def test_the_propagators_of_the_process_are_used() -> None:
    before = propagate.get_global_textmap()
    try:
        propagate.set_global_textmap(CompositePropagator([TraceContextTextMapPropagator()]))
        assert again({"traceparent": TRACEPARENT, "baggage": "a=1"}) == {"traceparent": TRACEPARENT}
        propagate.set_global_textmap(CompositePropagator([]))
        assert extract({"traceparent": TRACEPARENT}) is None
        assert linked(TraceLink(TRACEPARENT[3:35], TRACEPARENT[36:52])) is not None, "a link is no header"
    finally:
        propagate.set_global_textmap(before)


@pytest.mark.parametrize("link", [TraceLink("x" * 32, "1" * 16), TraceLink("1" * 1000, "1"), TraceLink("", "")])
def test_a_link_that_is_not_of_hex_digits_leads_nowhere(link: TraceLink) -> None:
    assert linked(link) is None
