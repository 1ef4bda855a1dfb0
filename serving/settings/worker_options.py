"""The options of workers: the engine of one, and where it is registered."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import asdict, frozen

from pipeline import InvalidArgument
from pipeline.settings import setting

from .graph_options import EngineOptions

if TYPE_CHECKING:
    from engines import WorkerConfig


@frozen
class HostedEngine(EngineOptions):
    """The engine that a worker hosts."""

    engine: str = setting(
        "", "Engine to host: echo, mocker, torch, or module:factory.", variable="", option=(), metavar="ENGINE"
    )

    def checked(self) -> None:
        """Raise InvalidArgument if there is no engine."""
        if not self.engine:
            raise InvalidArgument("is needed", field="engine")


@frozen
class RegisteredOptions:
    """Where workers are registered, and what is published with their model."""

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


@frozen
class WorkerOptions(RegisteredOptions):
    """The same for one worker, with its part of a request."""

    disaggregation_mode: str = setting("agg", "What the worker computes: agg, prefill, decode or encode.")
    may_prefill: bool = setting(
        False, "Whether a decode worker computes the prompts of requests that no prefill worker has taken."
    )

    def config(self) -> WorkerConfig:
        """Return the config of the worker. Raise InvalidArgument for a mode that there is not."""
        from engines import DisaggregationMode, WorkerConfig

        given: dict[str, Any] = asdict(self)
        given |= {"disaggregation_mode": DisaggregationMode.parse(self.disaggregation_mode)}
        given |= {name: given.pop(f"dyn_{name}") for name in ("tool_call_parser", "reasoning_parser")}
        if self.component is None:  # that of the mode
            del given["component"]
        return WorkerConfig(**given)
