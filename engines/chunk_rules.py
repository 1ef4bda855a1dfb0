"""What may come out of an engine, decided chunk by chunk, and what its errors become.

Source: dynamo lib/backend-common/src/validator.rs and error.rs. Other than there it never ends the process.
"""

from __future__ import annotations

from anyio import get_cancelled_exc_class

from pipeline import BackendError, Cancelled, ContractViolation, PenstockError, StreamIncomplete
from pipeline.errors import BackendCancelled, BackendInvalidArgument, BackendUnknown, described, ungrouped
from pipeline.protocols import FinishReason, LLMEngineOutput


class ChunkRules:
    """L1 for one request: so many choices, counted from 0, each with one terminal chunk.

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
        """Whether there is one choice, still open: a chunk without finish reason needs no look then."""
        return self._open == 1 and self._finished is None

    def admit(self, chunk: LLMEngineOutput) -> bool:
        """Whether this chunk is the last one of the stream. Raises ContractViolation for one that may not come."""
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
        """What ends a stream that ended without all of its terminal chunks: a cancelled one after a stop.

        None if a cancelled one was its last: of several choices one may say it for all. If nobody stopped it, raises
        StreamIncomplete, from the violation of L1; or the violation itself where the engine was done with the choices
        it gave: no other worker would give more.
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
    """Whether the engine says no more than that the request was given up."""
    return isinstance(error, Cancelled | BackendCancelled)
