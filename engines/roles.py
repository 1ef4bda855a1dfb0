"""DisaggregationMode: which part of a request a worker serves, and the checks of each.

Source: dynamo lib/backend-common/src/disagg.rs and lib/llm/src/worker_type.rs.

For engines of others, no program calls them: the rank in a request (`forced_dp_rank`), whether this worker has it
(`own_dp_rank`). Source: dynamo components/src/dynamo/common, forced_dp_rank and validate_global_dp_rank.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import StrEnum
from operator import index
from typing import Any

from attrs import evolve

from pipeline import InvalidArgument
from pipeline.protocols import CompletionUsage, LLMEngineOutput, PrefillResult, PreprocessedRequest
from pipeline.protocols.card import ModelType, WorkerType
from pipeline.protocols.openai import BYPASS_REMOTE_PREFILL


class DisaggregationMode(StrEnum):
    """The part of a request that a worker serves: all, the prompt, the output, or its media."""

    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"

    @classmethod
    def parse(cls, text: str) -> DisaggregationMode:
        """Return the mode with that name, or `agg` for short. Raises InvalidArgument for any other text."""
        name = text.strip().lower()
        try:
            return cls.AGGREGATED if name == "agg" else cls(name)
        except ValueError:
            names = ", ".join(("agg", *cls))
            raise InvalidArgument(f"must be one of {names}, got {text!r}", field="disaggregation_mode") from None

    @property
    def display(self) -> str:
        """Its name on the command line and in spans."""
        return "agg" if self is DisaggregationMode.AGGREGATED else self.value

    @property
    def component(self) -> str:
        """The default component of such workers."""
        return "prefill" if self is DisaggregationMode.PREFILL else "backend"

    @property
    def worker_type(self) -> WorkerType:
        return WorkerType(self.value)

    @property
    def may_index(self) -> bool:
        """Whether a worker of this mode may run an index of its own blocks."""
        return self in (DisaggregationMode.AGGREGATED, DisaggregationMode.PREFILL)

    def model_type(self, endpoints: ModelType) -> ModelType:
        """Return the model type in the worker's card, given that of its endpoint types."""
        if self is DisaggregationMode.PREFILL:
            return ModelType.Prefill
        return ModelType(0) if self is DisaggregationMode.ENCODE else endpoints

    def needs(self, *, route_to_encoder: bool = False, may_prefill: bool = False) -> list[list[WorkerType]]:
        """Return the other workers needed: all of any one list; without lists, none are.

        A decode worker that may prefill needs none. Raises InvalidArgument for a decode or encode worker that routes to
        an encoder.
        """
        prefill, decode, encode = WorkerType.PREFILL, WorkerType.DECODE, WorkerType.ENCODE
        if route_to_encoder and self in (DisaggregationMode.DECODE, DisaggregationMode.ENCODE):
            raise InvalidArgument(f"a {self} worker does not route to an encoder", field="route_to_encoder")
        if self is DisaggregationMode.PREFILL:
            return [[decode, encode] if route_to_encoder else [decode]]
        if self is DisaggregationMode.DECODE:
            return [] if may_prefill else [[prefill]]
        if self is DisaggregationMode.ENCODE:
            return [[prefill, decode], [WorkerType.AGGREGATED]]
        return [[encode]] if route_to_encoder else []


def enforce_prefill_max_tokens(request: PreprocessedRequest) -> PreprocessedRequest:
    """Return a copy limited to one token, which is all a prefill worker generates.

    A copy, because in one process the decode worker receives the same record.
    """
    stop = evolve(request.stop_conditions, max_tokens=1, min_tokens=None)
    return evolve(request, stop_conditions=stop)


def is_prefilled_elsewhere(request: PreprocessedRequest) -> bool:
    """Return whether a prefill worker computes the prompt, or has, as a decode worker expects."""
    return request.prefill_result is not None or request.bootstrap_info is not None


def require_prefill(request: PreprocessedRequest) -> None:
    """Raise InvalidArgument for a request to a decode worker without a prefill.

    Exempt are probes, and requests that their router leaves to the decode worker as a whole.
    """
    if not (is_prefilled_elsewhere(request) or request.is_probe or request.has_annotation(BYPASS_REMOTE_PREFILL)):
        raise InvalidArgument("a decode worker needs the prefill_result of the request", field="prefill_result")


def require_prefill_result(request: PreprocessedRequest, mode: DisaggregationMode) -> PrefillResult:
    """Return the result of the prefill. Raises InvalidArgument, naming the mode, if there is none."""
    if request.prefill_result is None:
        raise InvalidArgument(f"a {mode} worker needs the prefill_result of the request", field="prefill_result")
    return request.prefill_result


def require_encoder_result(request: PreprocessedRequest) -> dict[str, Any]:
    """Return the result of the encoder. Raises InvalidArgument if it is missing or not an object."""
    if not isinstance(request.encoder_result, dict):
        raise InvalidArgument("must be an object that an encoder has made", field="encoder_result")
    return request.encoder_result


def encoder_terminal_chunk(result: Any, usage: CompletionUsage | None = None) -> LLMEngineOutput:
    """Return the one chunk of an encode worker; `result` may be empty. Raise InvalidArgument unless it is an object."""
    if not isinstance(result, dict):
        raise InvalidArgument(f"must be an object, got {type(result).__name__}", field="encoder_result")
    chunk = LLMEngineOutput.encode_terminal(result)
    return chunk if usage is None else chunk.with_usage(usage)


_log = logging.getLogger(__name__)


def forced_dp_rank(request: PreprocessedRequest | Mapping[str, Any]) -> int | None:
    """Return the rank in the request's routing, also if written in digits; None without one.

    The request may be in plain values. Raises InvalidArgument for a text that is not a number.
    """
    routing: Any = request.get("routing") if isinstance(request, Mapping) else request.routing
    rank = routing.get("dp_rank") if isinstance(routing, Mapping) else getattr(routing, "dp_rank", None)
    if rank is None:
        return None
    try:
        return int(rank) if isinstance(rank, str) else index(rank)
    except (TypeError, ValueError):
        raise InvalidArgument(f"expected a rank, got {rank!r}", field="routing.dp_rank") from None


def own_dp_rank(rank: int | None, start: int, size: int) -> int | None:
    """Return the rank if it is one of the `size` ranks from `start`; None, with a warning, if it is another worker's.

    With a single rank always None.
    """
    if rank is None or size <= 1:
        return None
    if start <= rank < start + size:
        return rank
    _log.warning("the request names rank %d, this worker has [%d, %d)", rank, start, start + size)
    return None
