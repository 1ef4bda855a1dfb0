"""Which variables of the environment have spans exported, and what a wrong one ends with."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint, EntryPoints
from threading import Event
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExporter, SpanExportResult

from pipeline import InvalidArgument
from serving import trace_export
from serving.trace_export import exporters_of, exporting

HTTP, GRPC = "otlp_proto_http", "otlp_proto_grpc"
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[TracerProvider]:
    """The providers that would have become the process's, which can have only one."""
    found: list[TracerProvider] = []
    monkeypatch.setattr("opentelemetry.trace.set_tracer_provider", found.append)
    return found


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, []),
        ({"OTEL_SERVICE_NAME": "x", "OTEL_TRACES_SAMPLER": "always_on"}, []),
        (ENDPOINT, [HTTP]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, [HTTP]),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, []),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "TRUE"}, []),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, []),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": ""}, [HTTP]),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, [HTTP]),
        ({"OTEL_TRACES_EXPORTER": "console, otlp"}, ["console", HTTP]),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, [GRPC]),
        (
            ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"},
            [HTTP],
        ),
        ({"OTEL_EXPORT_ENABLED": "1"}, [HTTP]),
        ({"OTEL_EXPORT_ENABLED": "true", "OTEL_TRACES_EXPORTER": "console"}, ["console"]),
        (ENDPOINT | {"OTEL_EXPORT_ENABLED": "false"}, []),
        (ENDPOINT | {"OTEL_EXPORT_ENABLED": ""}, [HTTP]),
    ],
)
def test_the_environment_decides_where_spans_go(environment: dict[str, str], expected: list[str]) -> None:
    assert exporters_of(environment) == expected


def test_without_a_variable_nothing_is_set_up(made: list[TracerProvider]) -> None:
    with exporting({}) as tracer:
        assert tracer is None
    assert made == []


def test_an_unknown_protocol_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="'carrier-pigeon'") as refused:
        exporters_of(ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "carrier-pigeon"})
    assert refused.value.field == "OTEL_EXPORTER_OTLP_PROTOCOL"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("otlp", r"pip install 'penstock\[otlp\]'"), ("zipkin", "there is no exporter 'zipkin'")],
)
def test_an_exporter_that_is_not_installed_is_named(
    name: str, expected: str, monkeypatch: pytest.MonkeyPatch, made: list[TracerProvider]
) -> None:
    monkeypatch.setattr(trace_export, "entry_points", lambda **_: EntryPoints())
    with pytest.raises(InvalidArgument, match=expected), exporting({"OTEL_TRACES_EXPORTER": name}):
        pass
    assert made == []


def test_an_exporter_whose_own_package_is_incomplete_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("otlp_proto_http", "there_is_no_such_module:Exporter", "opentelemetry_traces_exporter")
    monkeypatch.setattr(trace_export, "entry_points", lambda **_: EntryPoints([broken]))
    with pytest.raises(InvalidArgument, match="there_is_no_such_module"), exporting(ENDPOINT):
        pass


def test_a_propagator_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setenv("OTEL_PROPAGATORS", "carrier-pigeon")
    monkeypatch.delitem(sys.modules, "opentelemetry.propagate", raising=False)
    with pytest.raises(InvalidArgument, match="carrier-pigeon") as refused, exporting(ENDPOINT):
        pass
    assert refused.value.field == "OTEL_PROPAGATORS"


def test_batches_that_do_not_fit_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "1")
    with pytest.raises(InvalidArgument, match=r"OTEL_BSP_\*"), exporting(ENDPOINT):
        pass


def test_spans_are_sent_when_the_block_is_left(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ConsoleSpanExporter.__init__, "__defaults__", _defaults_to_stdout())
    with exporting({"OTEL_TRACES_EXPORTER": "console"}) as tracer:
        assert tracer is not None
        tracer.start_span("first").end()
    span = json.loads(capfd.readouterr().out)
    assert span["name"] == "first"
    assert span["resource"]["attributes"]["service.name"] == "penstock"
    assert span["resource"]["attributes"]["service.version"]


def _defaults_to_stdout() -> tuple[Any, ...]:
    import sys

    defaults = ConsoleSpanExporter.__init__.__defaults__
    assert defaults is not None
    name, _, formatter = defaults
    return (name, sys.stdout, formatter)


@pytest.mark.parametrize(
    ("ratio", "sampler", "expected"),
    [("0.25", None, "TraceIdRatioBased{0.25}"), ("0.25", "always_off", "AlwaysOffSampler"), ("x", None, "AlwaysOn")],
)
def test_dynamos_ratio_counts_where_no_sampler_is_named(
    ratio: str, sampler: str | None, expected: str, monkeypatch: pytest.MonkeyPatch, made: list[TracerProvider]
) -> None:
    if sampler is not None:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    environment = {"OTEL_TRACES_EXPORTER": "console", "OTEL_TRACES_SAMPLE_RATIO": ratio}
    with exporting(environment | ({} if sampler is None else {"OTEL_TRACES_SAMPLER": sampler})):
        assert expected in made[0].sampler.get_description()


class Hanging(SpanExporter):
    """Sends nothing until it is shut down."""

    def __init__(self) -> None:
        self.is_cut = Event()

    def export(self, spans: Any) -> SpanExportResult:
        self.is_cut.wait(60)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.is_cut.set()


def test_the_end_waits_for_a_collector_that_hangs_no_longer_than_its_bound(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hanging = Hanging()
    monkeypatch.setattr(trace_export, "_exporter", lambda name: hanging)
    monkeypatch.setattr(trace_export, "FLUSH_S", 0.05)
    with exporting({"OTEL_TRACES_EXPORTER": "console"}) as tracer:
        assert tracer is not None
        tracer.start_span("lost").end()
    assert hanging.is_cut.is_set()
    assert "are lost" in caplog.text


def test_spans_beyond_the_queue_are_dropped_and_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = Hanging()
    monkeypatch.setattr(trace_export, "_exporter", lambda name: hanging)
    monkeypatch.setattr(trace_export, "FLUSH_S", 0.05)
    with exporting({"OTEL_TRACES_EXPORTER": "console"}) as tracer:
        assert tracer is not None
        for _ in range(10_000):
            tracer.start_span("one of many").end()
        hanging.is_cut.set()
