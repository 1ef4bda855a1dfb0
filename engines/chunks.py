"""The chunks of one request: rule L1, checked one by one, the errors of engines, and the attributes of their span.

Source: dynamo lib/backend-common/src/validator.rs, error.rs, and adapter.rs, the attributes of `engine.generate`. Other
than there a broken rule never ends the process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anyio import get_cancelled_exc_class

from pipeline import BackendError, Cancelled, ContractViolation, PenstockError, StreamIncomplete
from pipeline.errors import BackendCancelled, BackendInvalidArgument, BackendUnknown, described, ungrouped
from pipeline.protocols import FinishReason, LLMEngineOutput, PreprocessedRequest, TopLogprob


class ChunkContract:
    """L1 for one request: choices counted from 0, each with one terminal chunk.

    With `encodes` a terminal chunk that is neither cancelled nor an error must carry an object as `encoder_result`.
    """

    __slots__ = ("_choices", "_encodes", "_finished", "_is_at_end", "_open", "is_cancelled")

    def __init__(self, choices: int = 1, *, encodes: bool = False) -> None:
        self._choices = self._open = choices
        self._encodes = encodes
        self._finished: set[int] | None = None
        self._is_at_end = False
        self.is_cancelled = False
        """Whether the latest terminal chunk was a cancelled one."""

    @property
    def is_single(self) -> bool:
        """Whether there is one choice, still open: a chunk without finish reason then needs no check."""
        return self._open == 1 and self._finished is None

    def admit(self, chunk: LLMEngineOutput) -> bool:
        """Return whether this chunk is the last of the stream. Raises ContractViolation for one that breaks L1."""
        if not isinstance(chunk, LLMEngineOutput):
            raise ContractViolation(f"L1: the engine yielded {type(chunk).__name__}, not LLMEngineOutput", rule="L1")
        choice = chunk.index or 0
        if self._finished is not None and choice in self._finished:
            raise ContractViolation(f"L1: a chunk of choice {choice} after its terminal chunk", rule="L1")
        if not 0 <= choice < self._choices:
            raise ContractViolation(f"L1: a chunk of choice {choice}, where there are {self._choices}", rule="L1")
        self._is_at_end = (reason := chunk.finish_reason) is not None
        if reason is None:
            return False
        self.is_cancelled = reason == FinishReason.CANCELLED
        if self._encodes and not (self.is_cancelled or reason.is_error or isinstance(chunk.encoder_result, dict)):
            raise ContractViolation(
                "the terminal chunk of an encode worker carries no encoder_result object", rule="L1"
            )
        self._open -= 1
        if self._open:
            self._finished = {*(self._finished or ()), choice}
        return not self._open

    def cut_short(self, *, stopped: bool) -> LLMEngineOutput | None:
        """Return the chunk to end a stream without all of its terminal chunks: a cancelled one after a stop.

        None if its last chunk was a cancelled one, which may stand for several choices. Without a stop raises
        StreamIncomplete, from the violation of L1; or the violation itself where the engine finished the choices it
        gave: no other worker would give more.
        """
        if stopped:
            return None if self.is_cancelled else LLMEngineOutput.cancelled()
        if self._is_at_end:
            given = self._choices - self._open
            raise ContractViolation(f"L1: the engine gave {given} of {self._choices} choices", rule="L1")
        broken = ContractViolation("L1: the stream ended without its terminal chunk", rule="L1")
        raise StreamIncomplete(str(broken)) from broken


def engine_error(error: BaseException) -> PenstockError:
    """Return what an engine raised as an error of the tree: its own stays, a foreign one becomes a BackendError.

    Of an exception group it is the error that the group stands for, see `ungrouped`; the group is its cause unless it
    has one. A group of errors that differ is a BackendUnknown which names them. A cancellation that was not requested,
    as of a task of the engine's own, becomes BackendCancelled.
    """
    found = ungrouped(error)
    if found is not error and found.__cause__ is None:
        found.__cause__ = error
    if isinstance(found, PenstockError):
        return found
    kind: type[BackendError] = BackendUnknown
    if isinstance(found, ValueError | TypeError):
        kind = BackendInvalidArgument
    elif not isinstance(found, Exception | BaseExceptionGroup) and isinstance(found, get_cancelled_exc_class()):
        kind = BackendCancelled
    return kind(_text(found), cause=found)


def _text(error: BaseException) -> str:
    if not isinstance(error, BaseExceptionGroup):
        return described(error)
    return f"{error}: " + "; ".join(f"{type(one).__name__}: {_text(one)}" for one in error.exceptions)


def is_cancellation(error: PenstockError) -> bool:
    """Return whether the error only means that the request was cancelled."""
    return isinstance(error, Cancelled | BackendCancelled)


Attributes = dict[str, str | int | bool]


class GenerateRecord:
    """Times and counts of one request, collected while its chunks pass; `clock` in seconds."""

    def __init__(self, request: PreprocessedRequest, role: str, model: str, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun_s = self._last_s = clock()
        self._gaps_ms: list[float] = []
        self._ttft_ms: float | None = None
        self._output_tokens = 0
        self._finish_reason: str | None = None
        self._attributes: Attributes = {
            "model": model or request.model,
            "input_tokens": len(request.token_ids),
            "disagg_role": role,
        }

    def observe(self, chunk: LLMEngineOutput) -> None:
        """Record a chunk. Only those with tokens are timed."""
        if chunk.token_ids:
            now_s = self._clock()
            if self._ttft_ms is None:
                self._ttft_ms = (now_s - self._begun_s) * 1000
            else:
                self._gaps_ms.append((now_s - self._last_s) * 1000)
            self._last_s = now_s
            self._output_tokens += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            self._finish_reason = str(chunk.finish_reason)

    def attributes(self, *, cancelled: bool, dropped: bool, error_kind: str | None) -> Attributes:
        """Return all attributes so far; gaps only after at least two chunks with tokens."""
        attributes: Attributes = self._attributes | {
            "output_tokens": self._output_tokens,
            "cancelled": cancelled or dropped,
        }
        if dropped:
            attributes["finish_reason"] = "Dropped"
        elif self._finish_reason is not None:
            attributes["finish_reason"] = self._finish_reason
        if error_kind is not None:
            attributes["error_kind"] = error_kind
        if self._ttft_ms is not None:
            attributes["ttft_ms"] = milliseconds(self._ttft_ms)
        return attributes | gap_attributes(self._gaps_ms)


def gap_attributes(gaps_ms: Sequence[float]) -> Attributes:
    """Return average, median, 99th percentile and maximum of the times between chunks, if there are any."""
    if not gaps_ms:
        return {}
    ordered = sorted(gaps_ms)
    return {
        "avg_itl_ms": milliseconds(sum(ordered) / len(ordered)),
        "itl_p50_ms": milliseconds(nearest_rank(ordered, 0.5)),
        "itl_p99_ms": milliseconds(nearest_rank(ordered, 0.99)),
        "itl_max_ms": milliseconds(ordered[-1]),
    }


def nearest_rank(ordered: Sequence[float], share: float) -> float:
    """Return the value at index `(n - 1) * share`, halves rounded up, of sorted values."""
    return ordered[int((len(ordered) - 1) * share + 0.5)]


def milliseconds(value: float) -> str:
    """Return the text with two decimals."""
    return f"{value:.2f}"


def extract_logprobs(
    positions: Sequence[Any] | None, token_ids: Sequence[int], emitted_tokens: int = 0
) -> tuple[list[float] | None, list[list[TopLogprob]] | None]:
    """Return `log_probs` and `top_logprobs` of an engine's tokens: for engines of others, no program calls it.

    There is an entry for each token after the first `emitted_tokens`. `positions` has one entry for each of
    `token_ids`: a plain number (there are no candidates then), or a mapping from token id to something with `logprob`,
    and maybe `rank` and `decoded_token`. Where a rank is not given candidates are ranked by likelihood. Both are None
    unless every token has its own log probability.

    Source: dynamo components/src/dynamo/common, extract_logprobs. Other than there a token without one leaves the chunk
    without any, instead of shifting those behind it or taking another token's.
    """
    new, tokens = list((positions or ())[emitted_tokens:]), token_ids[emitted_tokens:]
    if not new or len(new) != len(tokens):
        return None, None
    if all(isinstance(entry, int | float) for entry in new):
        return [float(entry) for entry in new], None
    if not all(isinstance(entry, Mapping) and token in entry for entry, token in zip(new, tokens, strict=True)):
        return None, None
    chosen = [float(entry[token].logprob) for entry, token in zip(new, tokens, strict=True)]
    return chosen, [_candidates(entry) for entry in new]


def _candidates(entry: Mapping[int, Any]) -> list[TopLogprob]:
    """Return the candidates of one position, the most likely first."""
    ordered = sorted(entry.items(), key=lambda item: -item[1].logprob)
    return [
        TopLogprob(
            rank if (rank := getattr(info, "rank", None)) is not None else place,
            token_id,
            float(info.logprob),
            getattr(info, "decoded_token", None),
        )
        for place, (token_id, info) in enumerate(ordered, 1)
    ]
