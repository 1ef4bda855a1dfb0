"""GraphConfig: everything a standard graph is built from, checked in one place.

Hosting: what the workers of a graph share beside its config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from attrs import Factory, evolve, field, frozen

from engines import DisaggregationMode, LLMEngine, ShutdownTimes, SystemHealth, WorkerConfig
from operators import LAST_USER_MESSAGE, WHOLE_CHAT, BusyThresholds, Model
from operators.kv import KvRouterConfig
from pipeline import InvalidArgument
from pipeline.protocols.limits import PromptWork, RequestLimits
from pipeline.settings import Variable, switch

from .engines import Deployment, find_engine

if TYPE_CHECKING:
    from engines.mocker import RecordedOutputs
    from pipeline.telemetry import Metrics, Tracer


RouterName = Literal["round-robin", "random", "p2c", "least-loaded", "device-aware", "direct", "kv"]

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


@frozen
class GraphConfig:
    """What to serve and with what. Raises InvalidArgument, naming the field, for what cannot be served.

    `model_path` is a local model folder; without one the built-in byte-level model is served. `engine` is a name or
    `module:factory`, `engine_args` are texts by name, turned into what the engine's own arguments want. `workers` is
    the number of engine instances, hosted as `worker` says. With `prefill_workers` there are so many more that compute
    prompts only, and `workers` go on from there; while there are none, `workers` do both, or with `enforce_disagg`
    requests are refused. `kv_router` are the settings of the router `kv`. `migration_limit` is to how many other
    workers a request may go on whose worker fails, 0 for none, as long as it is no longer than
    `migration_max_seq_len_tokens`. `seed` makes repeatable what a router leaves to chance, and the ids of instances,
    which decide between equals. `busy` are the thresholds above which a worker is busy; each goes before that of the
    environment. `ignore_unsupported` lets fields of requests pass that have no meaning here, `request_limits` bound
    what a request may hold; `prompt_work` is how long prompts are worked on.
    """

    model_path: Path | None = None
    model_name: str | None = None
    engine: str = "echo"
    engine_args: Mapping[str, str] = field(factory=dict)
    workers: int = 1
    prefill_workers: int = 0
    enforce_disagg: bool = False
    worker: WorkerConfig = WorkerConfig(namespace="penstock", component="backend")
    router: RouterName = "round-robin"
    kv_router: KvRouterConfig = KvRouterConfig()
    migration_limit: int = 3
    migration_max_seq_len_tokens: int | None = None
    seed: int | None = None
    busy: BusyThresholds = BusyThresholds()
    ignore_unsupported: bool = False
    request_limits: RequestLimits = RequestLimits()
    prompt_work: PromptWork = PromptWork()

    def __attrs_post_init__(self) -> None:
        if self.model_name is not None and not self.model_name.strip():
            raise InvalidArgument("must not be empty", field="model_name")
        for name, low, value in (
            ("workers", 1, self.workers),
            ("prefill_workers", 0, self.prefill_workers),
            ("migration_limit", 0, self.migration_limit),
            ("migration_max_seq_len_tokens", 1, self.migration_max_seq_len_tokens),
        ):
            if value is not None and value < low:
                raise InvalidArgument(f"must be at least {low}, got {value}", field=name)
        _require_one_of(self.router, get_args(RouterName), "router")
        if self.router == "kv":
            _check_fits(self.kv_router, self.workers, self.prefill_workers)
        self._check_roles()
        self.worker.checked()
        for mode in self.modes:
            find_engine(self.engine).check(self.engine_args, self.deployment(mode))

    def _check_roles(self) -> None:
        if not self.prefill_workers:
            if self.enforce_disagg:
                raise InvalidArgument("there are no prefill workers to insist on", field="enforce_disagg")
            return
        if self.engine == "echo":
            raise InvalidArgument("the echo engine hands nothing over", field="prefill_workers")
        if self.worker.disaggregation_mode is not DisaggregationMode.AGGREGATED:
            raise InvalidArgument("beside prefill workers the others decode", field="disaggregation_mode")

    @property
    def modes(self) -> tuple[DisaggregationMode, ...]:
        """That of the workers, and of the prefill workers where there are some."""
        if self.prefill_workers:
            return (DisaggregationMode.DECODE, DisaggregationMode.PREFILL)
        return (self.worker.disaggregation_mode,)

    @property
    def needs_event_logs(self) -> bool:
        """Whether workers are to keep their KV events for a router that may ask for them."""
        return self.router == "kv" and self.kv_router.has_index and self.kv_router.use_kv_events

    async def make_engines(self, count: int, deployment: Deployment | None = None) -> list[LLMEngine]:
        """New engines of one deployment, not started. Raises InvalidArgument, naming the argument.

        What else a foreign factory raises comes as an error of the tree.
        """
        choice = find_engine(self.engine)
        deployment = self.deployment(self.modes[0]) if deployment is None else deployment
        return [await choice.build(self.engine_args, deployment) for _ in range(count)]

    def deployment(self, mode: DisaggregationMode) -> Deployment:
        """What engines have in common that are made in this mode."""
        letters = _LETTERS if self.model_path is None else None  # what the byte-level model can show
        return Deployment(letters, self.model_name, mode)

    def worker_settings(self, model: Model, mode: DisaggregationMode | None = None) -> WorkerConfig:
        """Those of each worker of a mode, by default of `worker`'s, with the model it serves.

        Prefill workers have a component of their own; decode workers prefill what nobody else does.
        """
        settings = self.worker
        if mode is DisaggregationMode.PREFILL and self.prefill_workers:
            settings = evolve(settings, disaggregation_mode=mode, component=mode.component)
        elif mode is DisaggregationMode.DECODE and self.prefill_workers:
            settings = evolve(settings, disaggregation_mode=mode, may_prefill=not self.enforce_disagg)
        if settings.model_name:
            return settings
        return evolve(settings, model_name=str(self.model_path or ""), served_model_name=model.name)

    def load_model(self) -> Model:
        """The model as text and token stages know it. Raises InvalidArgument for a folder that is not one.

        A chat template of the worker replaces the model's.
        """
        folder = self.model_path
        model = self._byte_level() if folder is None else Model.from_folder(folder, self.model_name)
        template = self.worker.custom_jinja_template
        return model if template is None else model.with_chat_template(template)

    def _byte_level(self) -> Model:
        """The built-in model.

        A mock engine is given the whole chat, and prompts in the token ids of any model; an engine that echoes, or may,
        the last message.
        """
        is_mock = self.engine == "mocker"
        model = Model.byte_level(self.model_name or "echo", chat_template=WHOLE_CHAT if is_mock else LAST_USER_MESSAGE)
        return evolve(model, checks_token_ids=not is_mock)


def _require_one_of(value: str, known: Sequence[str], name: str) -> None:
    if value not in known:
        raise InvalidArgument(f"must be one of {', '.join(known)}, got {value!r}", field=name)


def _check_fits(settings: KvRouterConfig, workers: int, prefill_workers: int) -> None:
    """Raise InvalidArgument for settings that could never come true in a standard graph, or would change nothing."""
    if settings.initial_workers > workers:
        text = f"the router would wait for {settings.initial_workers} workers, and there are {workers}"
        raise InvalidArgument(text, field="min_initial_workers")
    if settings.conditional_disagg_enabled and not prefill_workers:
        raise InvalidArgument("there are no prefill workers to pass by", field="conditional_disagg_enabled")


@frozen
class Hosting:
    """How the workers of a graph are hosted.

    `environment` is where workers and the router find their settings; `metrics` are of the component family. `times`
    are those of each worker's end; by default the environment's without a grace period, for in one process nobody has
    to hear first that it is gone. `recorded` are answers that are known: mock engines give them. With a `tracer`
    each stage of the graph and each engine has its span.
    """

    environment: Mapping[str, str] = field(factory=dict)
    metrics: Metrics | None = None
    health: SystemHealth | None = None
    recorded: RecordedOutputs | None = None
    tracer: Tracer | None = None
    times: ShutdownTimes = field(default=Factory(lambda self: _without_grace(self.environment), takes_self=True))


def _without_grace(environment: Mapping[str, str]) -> ShutdownTimes:
    return evolve(ShutdownTimes.from_environment(environment), grace_s=0.0)
