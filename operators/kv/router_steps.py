"""RoutingSteps: how long each step of a search for a worker takes, with a span around it if the request is traced.

Source: dynamo lib/llm/src/kv_router.rs and its metrics.rs, RoutingOverheadMetrics. Other than there a step that is not
needed (nothing is hashed without an index and without tracking) is not observed instead of observed as nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal, Self

from pipeline import Context
from pipeline.metrics import Instrument, Metrics
from pipeline.tracing import OpenSpan

Step = Literal["block_hashing", "seq_hashing", "indexer_find_matches", "scheduling"]
Recorders = Mapping[str, Callable[[float], object]]
"""By step, and `total`."""

SPANS: Mapping[Step, str] = {
    "block_hashing": "kv_router.compute_block_hashes",
    "seq_hashing": "kv_router.compute_seq_hashes",
    "scheduling": "kv_router.schedule",
}

OVERHEAD_PREFIX = "dynamo_router_overhead"
_COMPUTE_MS = tuple(2**step / 1000 for step in range(15))
_WAIT_MS = tuple(3**step / 100 for step in range(17))


def _overhead(step: str, description: str, bounds: tuple[float, ...]) -> Instrument:
    return Instrument(f"{step}_ms", "histogram", "", description, ("router_id",), bounds)


OVERHEAD_INSTRUMENTS = (
    _overhead("block_hashing", "Milliseconds to hash a prompt's blocks", _COMPUTE_MS),
    _overhead("seq_hashing", "Milliseconds to chain the hashes of a prompt's blocks", _COMPUTE_MS),
    _overhead("indexer_find_matches", "Milliseconds to look up who holds a prompt's blocks", _WAIT_MS),
    _overhead("scheduling", "Milliseconds to choose and book a worker, waiting for room included", _WAIT_MS),
    _overhead("total", "Milliseconds from asking for a worker to having one", _WAIT_MS),
)


def overhead_recorders(meter: Any, router_id: str) -> Recorders:
    """What to give a router's RoutingSteps."""
    metrics = Metrics(meter, prefix=OVERHEAD_PREFIX, rows=OVERHEAD_INSTRUMENTS)
    steps = [row.name.removesuffix("_ms") for row in OVERHEAD_INSTRUMENTS]
    return {step: metrics.recorder(f"{step}_ms", router_id=router_id) for step in steps}


class RoutingSteps:
    """The steps of one search, one after another: `with steps.step("scheduling"): ...`, then `end`.

    A step begins where the one before ended. One that fails is not timed, nor is the search then. `request` is the
    one the spans hang below; without it, or if it is not traced, there are none.
    """

    __slots__ = ("_began_s", "_last_s", "_now_s", "_record_ms", "_request", "_span", "_step", "_tracer")

    def __init__(
        self,
        now_s: Callable[[], float],
        record_ms: Recorders | None = None,
        *,
        request: Context[Any] | None = None,
        tracer: Any = None,
    ) -> None:
        self._now_s, self._record_ms = now_s, record_ms
        self._request = None if request is None or request.trace is None else request
        self._tracer = tracer
        self._step: Step = "scheduling"
        self._span: OpenSpan | None = None
        self._began_s = self._last_s = 0.0 if record_ms is None else now_s()

    def step(self, step: Step) -> Self:
        """The step that comes now, to be used in `with`."""
        self._step = step
        if self._request is not None and step in SPANS:
            self._span = OpenSpan(self._request, SPANS[step], tracer=self._tracer)
        return self

    def end(self) -> None:
        """All steps are done."""
        if self._record_ms is not None:
            self._record_ms["total"](1000 * (self._last_s - self._began_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (span := self._span) is not None:
            self._span = None
            if error is not None:
                span.fails(error)
            span.end()
        if error is None and self._record_ms is not None:
            before_s, self._last_s = self._last_s, self._now_s()
            self._record_ms[self._step](1000 * (self._last_s - before_s))
