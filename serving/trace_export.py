"""Export of a program's spans, configured by OpenTelemetry's environment variables.

    OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318 penstock serve

`OTEL_TRACES_EXPORTER` names exporters; without it spans go by OTLP if an endpoint is set. Otherwise there are none: no
provider, no tracer, no stage in a span. Sampler, resource, limits, batches and the exporter's own settings are read
from the environment by the SDK and the exporter. Source: the OpenTelemetry specification, environment variables; and
dynamo lib/runtime/src/logging.rs for `OTEL_EXPORT_ENABLED` and `OTEL_TRACES_SAMPLE_RATIO`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points, version
from threading import Thread
from typing import TYPE_CHECKING, Any

from pipeline import InvalidArgument
from pipeline.settings import TRUE, Variable, number, switch

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

    from pipeline.telemetry import Tracer

EXTRA = "otlp"
"""The extra of penstock with the exporter for OTLP over HTTP."""

SCHEMA_URL = "https://opentelemetry.io/schemas/1.41.1"
"""The revision of the semantic conventions that spans follow; see `serving.http.server_span`."""
FLUSH_S = 3.0
"""How long the end of a program waits for unsent spans."""

_ENABLED: Variable[bool | None] = Variable(
    "OTEL_EXPORT_ENABLED", None, "Whether spans are exported.", lambda text: text.lower() in TRUE
)
_DISABLED = Variable("OTEL_SDK_DISABLED", False, "Whether OpenTelemetry is switched off.", switch)
_SAMPLE_RATIO: Variable[float | None] = Variable(
    "OTEL_TRACES_SAMPLE_RATIO", None, "Part of the traces that is kept.", number(0, 1)
)
_EXPORTER = "OTEL_TRACES_EXPORTER"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SAMPLER = "OTEL_TRACES_SAMPLER"
_BY_PROTOCOL = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
_MISSING = {
    "otlp_proto_http": "spans are to go out by OTLP, and its exporter is not installed: "
    f"pip install 'penstock[{EXTRA}]'",
    "otlp_proto_grpc": "the exporter for gRPC is not installed: pip install opentelemetry-exporter-otlp-proto-grpc",
}
_NAMES = "expected otlp, console or none, or a name that an installed package brings"
_GROUP = "opentelemetry_traces_exporter"

_log = logging.getLogger(__name__)


@contextmanager
def exporting(environment: Mapping[str, str]) -> Iterator[Tracer | None]:
    """Yield the program's tracer, None if the environment exports no spans.

    The SDK reads its own variables from `os.environ`. The provider becomes that of the process, for engines that make
    spans themselves. The end of the block sends the remaining spans, for at most `FLUSH_S`; then they are lost.
    Raise InvalidArgument for an invalid variable and for an exporter that is not installed.
    """
    names = exporters_of(environment)
    if not names:
        yield None
        return

    made = [_exporter(name) for name in names]
    provider = _provider(environment, made)
    try:
        yield provider.get_tracer("penstock", version("penstock"), schema_url=SCHEMA_URL)
    finally:
        _flush(provider, made)


def exporters_of(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the exporters in the environment, those of OTLP with their protocol.

    Raise InvalidArgument for a protocol without an exporter.
    """
    enabled = _ENABLED.of(environment)
    if _DISABLED.of(environment) or enabled is False:
        return []
    has_endpoint = any(environment.get(name, "").strip() for name in _ENDPOINTS)
    default = "otlp" if enabled or has_endpoint else "none"
    names = [name.strip() for name in (environment.get(_EXPORTER, "").strip() or default).split(",")]
    if "none" in names:
        return []
    return [_otlp(environment) if name == "otlp" else name for name in names if name]


def _otlp(environment: Mapping[str, str]) -> str:
    for variable in _PROTOCOLS:
        if protocol := environment.get(variable, "").strip():
            if (name := _BY_PROTOCOL.get(protocol)) is None:
                raise InvalidArgument(f"expected one of {', '.join(_BY_PROTOCOL)}, got {protocol!r}", field=variable)
            return name
    return _BY_PROTOCOL["http/protobuf"]


def _exporter(name: str) -> SpanExporter:
    """Return the exporter of this name from an installed package, configured by its own variables."""
    found = next(iter(entry_points(group=_GROUP, name=name)), None)
    if found is None:
        raise InvalidArgument(_MISSING.get(name, f"there is no exporter {name!r}: {_NAMES}"), field=_EXPORTER)
    try:
        exporter: SpanExporter = found.load()()
    except ImportError as error:  # of a package that the exporter needs
        raise InvalidArgument(f"the exporter {name} cannot be loaded: {error}", field=_EXPORTER) from error
    except ValueError as error:  # names the variable
        raise InvalidArgument(f"the exporter {name} cannot be set up: {error}", field=_EXPORTER) from error
    return exporter


def _provider(environment: Mapping[str, str], exporters: list[SpanExporter]) -> TracerProvider:
    from opentelemetry import trace
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    _check_propagators()
    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "penstock"}))
    if SERVICE_VERSION not in resource.attributes:
        resource = resource.merge(Resource({SERVICE_VERSION: version("penstock")}))
    provider = TracerProvider(_sampler(environment), resource, shutdown_on_exit=False)
    for exporter in exporters:
        try:
            provider.add_span_processor(BatchSpanProcessor(exporter))
        except ValueError as error:
            raise InvalidArgument(f"the variables OTEL_BSP_* do not fit together: {error}") from error
    trace.set_tracer_provider(provider)
    return provider


def _sampler(environment: Mapping[str, str]) -> Any:
    """Return the sampler of Dynamo's ratio if OpenTelemetry's own variable is unset; None leaves it to the SDK."""
    if environment.get(_SAMPLER, "").strip() or (ratio := _SAMPLE_RATIO.of(environment)) is None:
        return None
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    return ParentBasedTraceIdRatio(ratio)


def _check_propagators() -> None:
    try:
        import opentelemetry.propagate  # noqa: F401  (reads the variable)
    except ValueError as error:
        raise InvalidArgument(str(error), field="OTEL_PROPAGATORS") from error


def _flush(provider: TracerProvider, exporters: list[SpanExporter]) -> None:
    """Send the remaining spans in a thread: the SDK would wait half a minute for a collector that hangs."""
    closing = Thread(target=provider.shutdown, name="last spans", daemon=True)
    closing.start()
    closing.join(FLUSH_S)
    if closing.is_alive():
        _log.warning("spans that were not sent within %g s of the end are lost", FLUSH_S)
        for exporter in exporters:
            exporter.shutdown()  # ends its wait before the next try
