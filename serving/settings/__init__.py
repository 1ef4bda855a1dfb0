"""What a user may set: the records of all options, and where their values come from.

Each field of a record is an option, a variable, a key of a settings file and a row of the docs; the command line reads
these records, and so does `penstock config`. Everything here is light: what a record makes is imported when it is made.
"""

from .graph_options import (
    UPSTREAM_API_KEY,
    ConfigOption,
    DrawOptions,
    EngineOptions,
    KeyOptions,
    LogLevelOption,
    MockerOptions,
    ModelOptions,
    QuietLogOption,
    ReplayGraph,
    RoutingOptions,
    ServedGraph,
    SweepPool,
    UpstreamOptions,
    graph_config,
)
from .graph_options import HostedUpstream as HostedUpstream
from .replay_options import (
    CompareOptions,
    GoodputOptions,
    LiveOptions,
    LoadOptions,
    ReportOptions,
    RunOptions,
    SweepReportOptions,
    check_files,
)
from .runtime_options import RUNTIME_TOKEN, FrontendOptions, RuntimeOptions, StatusOptions, UpOptions
from .server_options import AccessOptions, ServerOptions
from .sources import ENVIRONMENT_TABLE, Settled, Sources, WrongSettings, as_text, parts_of, settle
from .worker_options import HostedEngine, RegisteredOptions, WorkerOptions

__all__ = [
    "ENVIRONMENT_TABLE",
    "RUNTIME_TOKEN",
    "UPSTREAM_API_KEY",
    "AccessOptions",
    "CompareOptions",
    "ConfigOption",
    "DrawOptions",
    "EngineOptions",
    "FrontendOptions",
    "GoodputOptions",
    "HostedEngine",
    "KeyOptions",
    "LiveOptions",
    "LoadOptions",
    "LogLevelOption",
    "MockerOptions",
    "ModelOptions",
    "QuietLogOption",
    "RegisteredOptions",
    "ReplayGraph",
    "ReportOptions",
    "RoutingOptions",
    "RunOptions",
    "RuntimeOptions",
    "ServedGraph",
    "ServerOptions",
    "Settled",
    "Sources",
    "StatusOptions",
    "SweepPool",
    "SweepReportOptions",
    "UpOptions",
    "UpstreamOptions",
    "WorkerOptions",
    "WrongSettings",
    "as_text",
    "check_files",
    "graph_config",
    "parts_of",
    "settle",
]
