"""DisaggregationMode: which half of a request a worker serves, and what follows from that.

Source: dynamo lib/backend-common/src/disagg.rs and lib/llm/src/worker_type.rs.

Data parallel ranks: which one a request asks for, and whether this worker has it.

Source: dynamo components/src/dynamo/common, forced_dp_rank and validate_global_dp_rank.
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
    """The halves of a request: both, the prompt, the answer, or what comes before the prompt (media)."""

    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"

    @classmethod
    def parse(cls, text: str) -> DisaggregationMode:
        """The mode a text names, `agg` for short. Raises InvalidArgument for any other."""
        name = text.strip().lower()
        try:
            return cls.AGGREGATED if name == "agg" else cls(name)
        except ValueError:
            names = ", ".join(("agg", *cls))
            raise InvalidArgument(f"must be one of {names}, got {text!r}", field="disaggregation_mode") from None

    @property
    def display(self) -> str:
        """As the command line writes it."""
        return "agg" if self is DisaggregationMode.AGGREGATED else self.value

    @property
    def component(self) -> str:
        """The component such workers are found under unless told otherwise."""
        return "prefill" if self is DisaggregationMode.PREFILL else "backend"

    @property
    def worker_type(self) -> WorkerType:
        return WorkerType(self.value)

    @property
    def may_index(self) -> bool:
        """Whether a worker of this mode may run an index of its own blocks."""
        return self in (DisaggregationMode.AGGREGATED, DisaggregationMode.PREFILL)

    def model_type(self, endpoints: ModelType) -> ModelType:
        """What the worker publishes as its surface, given that of its endpoint types."""
        if self is DisaggregationMode.PREFILL:
            return ModelType.Prefill
        return ModelType(0) if self is DisaggregationMode.ENCODE else endpoints

    def needs(self, *, route_to_encoder: bool = False, may_prefill: bool = False) -> list[list[WorkerType]]:
        """Which other workers must be there: any one of these lists, whole; for none, no list.

        A decode worker that may prefill needs nobody. Raises InvalidArgument for a decode or encode worker that is to
        route to an encoder.
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
    """A copy limited to one token, which is all a prefill worker makes.

    A copy, because in one process the decode worker is given the same record.
    """
    stop = evolve(request.stop_conditions, max_tokens=1, min_tokens=None)
    return evolve(request, stop_conditions=stop)


def is_prefilled_elsewhere(request: PreprocessedRequest) -> bool:
    """Whether somebody else computes the prompt, or has: what a decode worker expects."""
    return request.prefill_result is not None or request.bootstrap_info is not None


def require_prefill(request: PreprocessedRequest) -> None:
    """Raises InvalidArgument for a request to a decode worker that says nothing of its prefill.

    Probes may, and requests that a router wants prefilled where they are decoded.
    """
    if not (is_prefilled_elsewhere(request) or request.is_probe or request.has_annotation(BYPASS_REMOTE_PREFILL)):
        raise InvalidArgument("a decode worker needs the prefill_result of the request", field="prefill_result")


def require_prefill_result(request: PreprocessedRequest, mode: DisaggregationMode) -> PrefillResult:
    """The result of the prefill. Raises InvalidArgument, naming the mode, if there is none."""
    if request.prefill_result is None:
        raise InvalidArgument(f"a {mode} worker needs the prefill_result of the request", field="prefill_result")
    return request.prefill_result


def require_encoder_result(request: PreprocessedRequest) -> dict[str, Any]:
    """What the encoder found. Raises InvalidArgument if there is nothing, or no object."""
    if not isinstance(request.encoder_result, dict):
        raise InvalidArgument("must be an object that an encoder has made", field="encoder_result")
    return request.encoder_result


def encoder_terminal_chunk(result: Any, usage: CompletionUsage | None = None) -> LLMEngineOutput:
    """The one chunk of an encode worker; `result` may be empty. Raises InvalidArgument for one that is no object."""
    if not isinstance(result, dict):
        raise InvalidArgument(f"must be an object, got {type(result).__name__}", field="encoder_result")
    chunk = LLMEngineOutput.encode_terminal(result)
    return chunk if usage is None else chunk.with_usage(usage)


_log = logging.getLogger(__name__)


def forced_dp_rank(request: PreprocessedRequest | Mapping[str, Any]) -> int | None:
    """The rank that the request's routing names, also as digits; None if it names none.

    The request may be given as plain values. Raises InvalidArgument for a text that is no number.
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
    """The rank if it is one of the `size` ranks from `start`; None, with a warning, if it is another worker's.

    Where there is only one rank the question does not arise: None.
    """
    if rank is None or size <= 1:
        return None
    if start <= rank < start + size:
        return rank
    _log.warning("the request asks for rank %d, this worker has [%d, %d)", rank, start, start + size)
    return None
