"""GenerateRecord: what the span of one request says, collected while its chunks pass.

Source: dynamo lib/backend-common/src/adapter.rs, the attributes of `engine.generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeline.protocols import LLMEngineOutput, PreprocessedRequest

Attributes = dict[str, str | int | bool]


class GenerateRecord:
    """Times and counts of one request; `clock` in seconds."""

    def __init__(self, request: PreprocessedRequest, role: str, model: str, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun_s = self._last_s = clock()
        self._gaps_ms: list[float] = []
        self._ttft_ms: float | None = None
        self._output_tokens = 0
        self._finish_reason: str | None = None
        self._said: Attributes = {
            "model": model or request.model,
            "input_tokens": len(request.token_ids),
            "disagg_role": role,
        }

    def saw(self, chunk: LLMEngineOutput) -> None:
        """A chunk passed. Only those with tokens are timed."""
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
        """Everything that is known now; gaps only if there were at least two chunks with tokens."""
        said: Attributes = self._said | {"output_tokens": self._output_tokens, "cancelled": cancelled or dropped}
        if dropped:
            said["finish_reason"] = "Dropped"
        elif self._finish_reason is not None:
            said["finish_reason"] = self._finish_reason
        if error_kind is not None:
            said["error_kind"] = error_kind
        if self._ttft_ms is not None:
            said["ttft_ms"] = milliseconds(self._ttft_ms)
        return said | gap_attributes(self._gaps_ms)


def gap_attributes(gaps_ms: Sequence[float]) -> Attributes:
    """Average, median, 99th percentile and maximum of the times between chunks; nothing for none."""
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
    """The value at index `(n - 1) * share`, halves rounded up, of sorted values."""
    return ordered[int((len(ordered) - 1) * share + 0.5)]


def milliseconds(value: float) -> str:
    """With two decimals."""
    return f"{value:.2f}"
