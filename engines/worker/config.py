"""WorkerConfig: where and as what a worker serves its engine.

Source: dynamo lib/backend-common/src/worker.rs, WorkerConfig, and components/src/dynamo/common/backend/worker.py.
Which planes a worker uses is the `Runtime` it is given, not a setting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from math import inf
from pathlib import Path
from typing import Any, Self

from attrs import Factory, converters, field, fields, frozen

from pipeline import InvalidArgument
from pipeline.protocols.card import ByteLevel, ModelInput, ModelType
from pipeline.settings import ANY, by_variable, from_environment, number, whole
from pipeline.telemetry import with_labels

from ..llm import EngineConfig
from ..roles import DisaggregationMode

_ENDPOINT_TYPES = {
    "chat": ModelType.Chat,
    "completions": ModelType.Completions,
    "embedding": ModelType.Embedding,
    "embeddings": ModelType.Embedding,
    "tensor": ModelType.TensorBased,
    "image": ModelType.Images,
    "images": ModelType.Images,
    "video": ModelType.Videos,
    "videos": ModelType.Videos,
    "audio": ModelType.Audios,
    "audios": ModelType.Audios,
}

_OTHER_NAMES = {
    "disaggregation_mode": ("serving_mode",),
    "tool_call_parser": ("dyn_tool_call_parser",),
    "reasoning_parser": ("dyn_reasoning_parser",),
}
"""Under which names else `from_runtime_config` looks for a setting."""


@frozen(kw_only=True)
class WorkerConfig:
    """A worker's own settings; its engine's facts are in the `EngineConfig`."""

    namespace: str = "dynamo"
    """Namespace of the endpoint."""
    disaggregation_mode: DisaggregationMode = DisaggregationMode.AGGREGATED
    """The part of a request that the worker serves. Default: all of it."""
    component: str = field(default=Factory(lambda self: self.disaggregation_mode.component, takes_self=True))
    """Component of the endpoint. Default: that of the mode, backend or prefill."""
    endpoint: str = "generate"
    """Name of the endpoint."""
    model_name: str = ""
    """Folder of the model, or its name. Empty: the engine's."""
    served_model_name: str | None = None
    """Name for clients. None: the engine's."""
    model_input: ModelInput = "Tokens"
    """Form of the requests; an LLMEngine takes Tokens."""
    endpoint_types: str = "chat,completions"
    """Surfaces that a front end opens, separated by commas: see `parse_endpoint_types`."""
    write_model: Callable[[Path], None] | None = field(default=None, repr=False)
    """Writes the text side of a model that is no folder into one, for the card. None: the model has none."""
    adapters: tuple[str, ...] = ()
    """Names of the LoRA adapters that the engine has; each gets a card of its own."""
    byte_level: ByteLevel | None = None
    """What the built-in model has in place of a folder. None: another model."""
    tokenizes: bool = False
    """Whether the engine gives the texts of its tokens, and its host makes tokens of prompts: front ends have no
    tokenizer of the model."""
    custom_jinja_template: Path | None = field(default=None, converter=converters.optional(Path))
    """Chat template instead of the model's own."""
    tool_call_parser: str | None = None
    """Parser of tool calls for the front end. None: none."""
    reasoning_parser: str | None = None
    """Parser of reasoning for the front end. None: none."""
    exclude_tools_when_tool_choice_none: bool = True
    """Whether the chat template gets no tools if the tool choice is none."""
    enable_local_indexer: bool = True
    """Whether the worker answers routers that missed KV events, if its mode may."""
    enable_kv_routing: bool = True
    """Whether KV events and load are published."""
    metrics_labels: Sequence[tuple[str, str]] = ()
    """Labels of the engine's own metrics, as names and values."""
    health_check_payload: Mapping[str, Any] | None = None
    """Payload of probes instead of the engine's, as plain values."""
    route_to_encoder: bool = False
    """Whether media are encoded by an encode worker."""
    may_prefill: bool = False
    """Whether a decode worker computes the prompts of requests without a prefill, which it refuses otherwise."""

    @classmethod
    def from_runtime_config(cls, runtime_config: object, **overrides: Any) -> Self:
        """From the attributes of a program's own settings, where it has them; the overrides win.

        An attribute that is None or empty counts as missing. The mode may be another enum with members of the same
        names; raises TypeError for a mode that is no enum, and InvalidArgument for a member no mode is named like.
        """
        found: dict[str, Any] = {}
        for name in (attribute.name for attribute in fields(cls) if attribute.name not in overrides):
            values = (getattr(runtime_config, other, None) for other in (name, *_OTHER_NAMES.get(name, ())))
            if (value := next((value for value in values if value is not None and value != ""), None)) is not None:
                found[name] = _mode(value) if name == "disaggregation_mode" else value
        return cls(**found | overrides)

    @property
    def model_type(self) -> ModelType:
        """What the worker publishes as its surface. Raises InvalidArgument for endpoint types there are not."""
        return self.disaggregation_mode.model_type(parse_endpoint_types(self.endpoint_types))

    def checked(self) -> Self:
        """This config. Raises InvalidArgument, naming the field, for what a worker of an LLMEngine cannot be."""
        if self.model_input != "Tokens":
            raise InvalidArgument(f"an LLMEngine takes Tokens, not {self.model_input}", field="model_input")
        self.disaggregation_mode.needs(route_to_encoder=self.route_to_encoder)
        parse_endpoint_types(self.endpoint_types)
        if self.custom_jinja_template is not None:
            _check_file(self.custom_jinja_template)
        try:
            with_labels("", dict(self.metrics_labels))
        except InvalidArgument as error:
            raise InvalidArgument(str(error), field="metrics_labels") from None
        return self


def _check_file(template: Path) -> None:
    try:
        is_file = template.is_file()
    except OSError as error:
        raise InvalidArgument(str(error), field="custom_jinja_template") from error
    if not is_file:
        raise InvalidArgument(f"{template} is no file", field="custom_jinja_template")


def _mode(value: object) -> DisaggregationMode:
    if not isinstance(value, Enum):
        raise TypeError(f"the mode must be an enum such as DisaggregationMode, got {value!r}")
    found = DisaggregationMode.__members__.get(value.name.upper())
    if found is None:
        raise InvalidArgument(f"no mode is named {value.name!r}", field="disaggregation_mode")
    return found


def parse_endpoint_types(text: str) -> ModelType:
    """The surfaces a list with commas names, whatever the case: chat, completions, embedding, tensor, image, video and
    audio, the last four but tensor also in the plural.

    Raises InvalidArgument for an empty list and for any other name; `prefill` is a mode, not a surface.
    """
    names = [name for part in text.split(",") if (name := part.strip().lower())]
    if not names:
        raise InvalidArgument("endpoint_types cannot be empty", field="endpoint_types")
    surfaces = ModelType(0)
    for name in names:
        if name not in _ENDPOINT_TYPES:
            known = ", ".join(_ENDPOINT_TYPES)
            raise InvalidArgument(f"must be some of {known}, got {name!r}", field="endpoint_types")
        surfaces |= _ENDPOINT_TYPES[name]
    return surfaces


def served_name(worker: WorkerConfig, engine: EngineConfig) -> str:
    """Return the name for clients: the worker's, else the engine's, else that of the model; a blank one is skipped."""
    names = (worker.served_model_name, engine.served_model_name, engine.model)
    return next((name for name in names if name and name.strip()), "")


@frozen
class ShutdownTimes:
    """How long each part of a worker's end may take.

    Source: dynamo lib/backend-common/src/worker.rs, grace_period_secs, graceful_shutdown_timeout (that of its release
    builds) and shutdown_deadline.
    """

    grace_s: float = by_variable(
        5.0,
        "Seconds that a worker serves on after it has become invisible; below 0: none.",
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS",
        lambda text: max(number(-inf)(text), 0.0),
        ANY,
    )
    timeout_s: float = by_variable(
        30.0,
        "Seconds after that for draining and cleaning up.",
        "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT",
        whole(0, 10**9 - 1, unit=1.0),
    )

    @property
    def deadline_s(self) -> float:
        """For all of it. The grace is added: with timeout 5 and grace 5.1 nothing would be left to clean up in."""
        return self.timeout_s + max(self.grace_s, 0.0)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """A grace below zero is none; what is empty or no number is the default, as is a timeout not in digits."""
        return cls(**from_environment(cls, environment))
