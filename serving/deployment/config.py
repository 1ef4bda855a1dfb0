"""GraphConfig: everything a standard graph is built from, checked in one place.

HostOptions: what the workers of a graph share beside its config.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from anyio import to_thread
from attrs import Factory, evolve, field, frozen

from engines import DisaggregationMode, LLMEngine, ShutdownTimes, SystemHealth, WorkerConfig
from engines.torch import ModelFiles, ReportProgress, no_report
from operators import BusyThresholds, Model
from operators.kv import KvRouterConfig
from operators.text import LAST_USER_MESSAGE, WHOLE_CHAT
from pipeline import InvalidArgument
from pipeline.protocols.limits import PromptWork, RequestLimits
from pipeline.settings import Variable, at_least, one_of, setting, switch

from ..routers import RouterName as RouterName
from .engines import Deployment, find_engine
from .model_files import is_gguf, model_at
from .server_prompts import has_text_at_servers
from .upstream_config import UpstreamConfig

if TYPE_CHECKING:
    from engines.mocker import Horizon, RecordedOutputs
    from engines.upstream import Transport
    from pipeline.telemetry import Metrics, Tracer


T = TypeVar("T")

METRICS_PREFIX: Variable[str | None] = Variable(
    "DYN_METRICS_PREFIX", None, "Prefix of all metrics, dynamo_frontend by default.", str
)
IGNORE_UNSUPPORTED = Variable(
    "DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS",
    False,
    "Whether unknown fields of requests are dropped instead of refused.",
    switch,
)

_LETTERS = range(ord("a"), ord("z") + 1)


def _bounded(default: T, low: int) -> T:
    """Return a field for a number from `low` on."""
    return setting(default, "", at_least(low), variable="", option=())


@frozen
class GraphConfig:
    """What to serve and with what. Raise InvalidArgument that names the field for what cannot be served."""

    model_path: Path | None = None
    """Local model folder, or GGUF file; None: the built-in byte-level model."""
    model_name: str | None = None
    """Name of the model for clients; None: the folder's name, or echo."""
    engine: str = "echo"
    """Name of an engine, or `module:factory`."""
    engine_args: Mapping[str, str] = field(factory=dict)
    """Texts by name, converted to the types of the engine's own parameters."""
    lora: Mapping[str, Path] = field(factory=dict)
    """Folders of LoRA adapters of the torch engine by name; each is a model of its own for clients."""
    workers: int = _bounded(1, 1)
    """Engine instances; with prefill workers they decode."""
    prefill_workers: int = _bounded(0, 0)
    """Engine instances that compute prompts only. Without any, `workers` do both."""
    enforce_disagg: bool = False
    """Whether requests are refused while no prefill worker is there."""
    worker: WorkerConfig = WorkerConfig(namespace="penstock", component="backend")
    """How each worker is registered."""
    router: RouterName = setting("round-robin", "", one_of(*get_args(RouterName)), variable="", option=())
    kv_router: KvRouterConfig = KvRouterConfig()
    """Settings of the router `kv`."""
    migration_limit: int = _bounded(3, 0)
    """Number of other workers on which a request may continue after a failure; 0 switches migration off."""
    migration_max_seq_len_tokens: int | None = _bounded(None, 1)
    """Tokens beyond which a request does not continue on another worker; None: no limit."""
    seed: int | None = None
    """Makes repeatable what a router leaves to chance, and the ids of instances, which decide between equals."""
    busy: BusyThresholds = BusyThresholds()
    """Thresholds above which a worker is busy; each comes before that of the environment."""
    ignore_unsupported: bool = False
    """Whether fields of requests that have no meaning here are ignored, not refused."""
    request_limits: RequestLimits = RequestLimits()
    """Bounds on what a request may hold."""
    prompt_work: PromptWork = PromptWork()
    """How prompts are prepared."""
    upstream: UpstreamConfig | None = None
    """Servers that take the place of engines; None: engines of this process."""
    is_announced: bool = False
    """Whether the workers are those that other processes announce; they bring their models, none of which is here."""

    def __attrs_post_init__(self) -> None:
        if self.model_name is not None and not self.model_name.strip():
            raise InvalidArgument("must not be empty", field="model_name")
        if self.router == "kv" and not self.is_announced:
            workers = self.workers if self.upstream is None else len(self.upstream.urls)
            _check_fits(self.kv_router, workers, self.has_prefill_pool)
        self._check_roles()
        self.worker.checked()
        self._check_lora()
        if self.upstream is not None or self.is_announced:
            return
        for mode in self.modes:
            find_engine(self.engine).check(self.engine_args, self.deployment(mode))

    def _check_roles(self) -> None:
        if self.is_announced:
            self._check_unset(
                "does not go with workers of other processes", model_path=None, model_name=None, upstream=None
            )
            return
        if not self.has_prefill_pool and self.enforce_disagg:
            raise InvalidArgument("there are no prefill workers to insist on", field="enforce_disagg")
        if self.upstream is not None:
            self._check_unset("does not go with upstream servers, which are there as they are")
            return
        if not self.prefill_workers:
            return
        if self.engine == "echo":
            raise InvalidArgument("the echo engine hands nothing over", field="prefill_workers")
        if self.worker.disaggregation_mode is not DisaggregationMode.AGGREGATED:
            raise InvalidArgument("beside prefill workers the others decode", field="disaggregation_mode")

    def _check_unset(self, problem: str, **more: Any) -> None:
        """Raise InvalidArgument for a field of engines of this process, or of `more`, that has not its default."""
        for name, default in {"engine": "echo", "engine_args": {}, "workers": 1, "prefill_workers": 0, **more}.items():
            if getattr(self, name) != default:
                raise InvalidArgument(problem, field=name)

    def _check_lora(self) -> None:
        if not self.lora:
            return
        if self.upstream is not None or self.engine != "torch":
            raise InvalidArgument("is for --engine torch only", field="lora")
        if self.model_path is not None and (self.model_name or ModelFiles(self.model_path).name) in self.lora:
            raise InvalidArgument("an adapter has the name of the model", field="lora")
        for folder in self.lora.values():
            if not (folder / "adapter_config.json").is_file():
                raise InvalidArgument(f"{folder} has no adapter_config.json", field="lora")

    @property
    def has_prefill_pool(self) -> bool:
        """Whether some workers, or servers, compute prompts only."""
        return bool(self.prefill_workers or (self.upstream is not None and self.upstream.prefill_urls))

    @property
    def modes(self) -> tuple[DisaggregationMode, ...]:
        """Modes of the workers: one, or decode and prefill."""
        if self.has_prefill_pool:
            return (DisaggregationMode.DECODE, DisaggregationMode.PREFILL)
        return (self.worker.disaggregation_mode,)

    @property
    def needs_event_logs(self) -> bool:
        """Whether workers keep their KV events, from which a router recovers those it missed."""
        return self.router == "kv" and self.kv_router.has_index and self.kv_router.use_kv_events

    @property
    def reads_rates(self) -> bool:
        """Whether a router reads what workers report of their passes: if it places by a delay."""
        return self.router == "kv" and self.kv_router.router_placement != "cost"

    async def make_engines(self, count: int, deployment: Deployment | None = None) -> list[LLMEngine]:
        """Return new engines of one deployment, not started. Raise InvalidArgument that names the argument.

        Any other exception of a foreign factory is raised as an error of the tree.
        """
        choice = find_engine(self.engine)
        deployment = self.deployment(self.modes[0]) if deployment is None else deployment
        return [await choice.build(self.engine_args, deployment) for _ in range(count)]

    def deployment(self, mode: DisaggregationMode) -> Deployment:
        """Return what the engines of a mode have in common."""
        letters = _LETTERS if self.model_path is None else None  # what the byte-level model can show
        return Deployment(letters, self.model_name, mode, model_path=self.model_path, lora=self.lora)

    def worker_settings(self, model: Model, mode: DisaggregationMode | None = None) -> WorkerConfig:
        """Return the settings of each worker of a mode, by default that of `worker`, with the model it serves.

        Prefill workers have a component of their own; decode workers prefill what no prefill worker does.
        """
        settings = self.worker
        if mode is DisaggregationMode.PREFILL and self.has_prefill_pool:
            settings = evolve(settings, disaggregation_mode=mode, component=mode.component)
        elif mode is DisaggregationMode.DECODE and self.has_prefill_pool:
            settings = evolve(settings, disaggregation_mode=mode, may_prefill=not self.enforce_disagg)
        if self.lora:
            settings = evolve(settings, adapters=tuple(self.lora))
        if has_text_at_servers(model):
            settings = evolve(settings, tokenizes=True)
        if settings.model_name:
            return settings
        if is_gguf(self.model_path):  # the card is made of a folder's files, and this is one file
            return evolve(settings, model_name=model.name, served_model_name=model.name, write_model=model.write_folder)
        name = str(self.model_path or "")
        return evolve(settings, model_name=name, served_model_name=model.name, byte_level=model.byte_level_parts)

    def in_namespace_of(self, model_name: str) -> GraphConfig:
        """Return the config with a namespace of the model's own, for workers that share a runtime with other models.

        An endpoint serves one model.
        """
        namespace = f"{self.worker.namespace}-{slug(model_name)}"
        return evolve(self, worker=evolve(self.worker, namespace=namespace))

    def load_model(self) -> Model:
        """Return the model for text and token stages. Raise InvalidArgument for a path that is not a model.

        A chat template of the worker replaces the model's. A GGUF file takes seconds.
        """
        model = self._byte_level() if self.model_path is None else model_at(self.model_path, self.model_name)
        template = self.worker.custom_jinja_template
        return model if template is None else model.with_chat_template(template)

    async def loaded_model(self) -> Model:
        """Return the same; a model that takes seconds is read in a thread, which a cancellation does not wait for."""
        if not is_gguf(self.model_path):
            return self.load_model()
        return await to_thread.run_sync(self.load_model, abandon_on_cancel=True)

    def _byte_level(self) -> Model:
        """Return the built-in model.

        A mock engine gets the whole chat, and prompts in the token ids of any model; other engines, which may echo, get
        the last message.
        """
        is_mock = self.engine == "mocker"
        model = Model.byte_level(self.model_name or "echo", chat_template=WHOLE_CHAT if is_mock else LAST_USER_MESSAGE)
        return evolve(model, checks_token_ids=not is_mock)


def _check_fits(settings: KvRouterConfig, workers: int, has_prefill_pool: bool) -> None:
    """Raise InvalidArgument for settings that could never come true in a standard graph, or would change nothing."""
    if settings.initial_workers > workers:
        text = f"the router would wait for {settings.initial_workers} workers, and there are {workers}"
        raise InvalidArgument(text, field="min_initial_workers")
    if settings.conditional_disagg_enabled and not has_prefill_pool:
        raise InvalidArgument("there are no prefill workers to pass by", field="conditional_disagg_enabled")


def slug(name: str) -> str:
    """Return a model's name as part of a namespace; a name that has to be changed for that gets a checksum."""
    plain = re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-")
    return plain if plain == name else f"{plain}-{hashlib.blake2s(name.encode(), digest_size=4).hexdigest()}"


@frozen
class HostOptions:
    """How the workers of a graph are hosted, beside its config."""

    environment: Mapping[str, str] = field(factory=dict)
    """Variables of the workers and the router."""
    metrics: Metrics | None = None
    """Metrics of the component family."""
    health: SystemHealth | None = None
    """Health of the process, which workers report to."""
    recorded: RecordedOutputs | None = None
    """Known answers, for mock engines to give."""
    horizon: Horizon | None = None
    """How far mock engines may run ahead in virtual time; None: not at all."""
    is_closed: bool = False
    """Whether nothing but the graph reads what its workers publish, of which nothing gets lost: then they keep no KV
    events for a recovery, and mock engines publish events and loads only where a router of the graph reads them."""
    transports: Mapping[str, Transport] = field(factory=dict)
    """What replaces the network to upstream servers, by URL."""
    report_loading: ReportProgress = no_report
    """Called with the progress of each model that an engine loads."""
    tracer: Tracer | None = None
    """Makes a span for each stage of the graph and each engine; None: there are none."""
    times: ShutdownTimes = field(default=Factory(lambda self: _without_grace(self.environment), takes_self=True))
    """Times of each worker's shutdown; by default the environment's without a grace period, for a router in the same
    process knows at once that a worker is gone."""


def _without_grace(environment: Mapping[str, str]) -> ShutdownTimes:
    return evolve(ShutdownTimes.from_environment(environment), grace_s=0.0)
