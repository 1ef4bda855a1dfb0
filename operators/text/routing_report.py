"""What is known of a request's workers and times, put on the first and the last item of its answer.

    answer ──► first item: workers ──► ... ──► last item: workers, timing

Only for requests that want it (`nvext`).

Source: dynamo lib/llm/src/protocols/openai/chat_completions/delta.rs. Other than
there an answer of several choices has one last item, and what an item already holds stays.
"""

from __future__ import annotations

from copy import copy

from attrs import define, evolve, field

from pipeline import Annotated, Context, ResponseStream
from pipeline.protocols import BackendOutput, RequestPhase, RequestTracker, RoutingData
from pipeline.protocols.openai import ChatCompletionRequest, CompletionRequest
from pipeline.protocols.timing import WorkerIdInfo

Item = Annotated[BackendOutput]
OpenAIRequest = ChatCompletionRequest | CompletionRequest

_REPORTED = frozenset({"worker_id", "timing", "router_decision"})


def with_routing(
    stream: ResponseStream[Item], request: Context[OpenAIRequest], tracker: RequestTracker
) -> ResponseStream[Item]:
    """Return the stream with the tracker's facts that its request wants; the stream itself if it wants none."""
    nvext = request.payload.nvext
    if nvext is None or not (wanted := nvext.wanted_response_fields()) & _REPORTED:
        return stream
    return stream.map(RoutingReport(tracker, wanted, set(range(request.payload.n or 1))).of)


@define(eq=False)
class RoutingReport:
    """What the items of one answer report. `wanted` are fields of the response's `nvext`.

    The answer is over when its last choice is: one that finishes before has no figures of the whole request. What no
    router below has recorded, the first token and the length, is recorded here.
    """

    tracker: RequestTracker
    wanted: frozenset[str]
    _unfinished: set[int]
    _tokens: int = field(default=0, init=False)
    _has_begun: bool = field(default=False, init=False)

    def of(self, item: Item) -> Item:
        """Return the item, or a copy with the facts added. Events, and items without data, stay as they are."""
        output = item.data
        if output is None or item.event is not None:
            return item
        if output.token_ids:
            self._count(len(output.token_ids))
        is_last = self._finishes(output)
        if self._has_begun and not is_last:
            return item
        self._has_begun = True
        if is_last:
            self.tracker.record_answer(self._tokens)
        known = self._known(is_last)
        if known is None:
            return item
        report = copy(output)
        report.routing_data = known if report.routing_data is None else filled(report.routing_data, known)
        return item.transfer(report)

    def _count(self, tokens: int) -> None:
        if not self._tokens:
            self.tracker.record_first_token()
            if self.tracker.phase is RequestPhase.DECODE:
                self.tracker.record_decode_first_token()
        self._tokens += tokens

    def _finishes(self, output: BackendOutput) -> bool:
        """Whether the last choice ends with this item."""
        if output.finish_reason is None or not self._unfinished:
            return False
        self._unfinished.discard(output.index or 0)
        return not self._unfinished

    def _known(self, is_last: bool) -> RoutingData | None:
        tracker, wanted = self.tracker, self.wanted
        known = RoutingData(
            tracker.timing_info() if is_last and "timing" in wanted else None,
            tracker.worker_info() if "worker_id" in wanted else None,
            tracker.external_query_token_ids if "token_ids" in wanted else None,
            tracker.decision() if "router_decision" in wanted else None,
        )
        return None if known == RoutingData() else known


def filled(own: RoutingData, known: RoutingData) -> RoutingData:
    """Return the item's own data with its gaps filled from what is known. Pure."""
    timing = own.timing or known.timing
    if own.timing is not None and known.timing is not None:
        timing = copy(own.timing)
        timing.fill_gaps(known.timing)
    return RoutingData(
        timing,
        _workers(own.worker_id, known.worker_id),
        known.token_ids if own.token_ids is None else own.token_ids,
        own.decision or known.decision,
    )


def _workers(own: WorkerIdInfo | None, known: WorkerIdInfo | None) -> WorkerIdInfo | None:
    if own is None or known is None:
        return own or known
    whole = own
    # A rank without its worker would be another worker's.
    if own.prefill_worker_id in (None, known.prefill_worker_id) and own.prefill_dp_rank is None:
        whole = evolve(whole, prefill_worker_id=known.prefill_worker_id, prefill_dp_rank=known.prefill_dp_rank)
    if own.decode_worker_id in (None, known.decode_worker_id) and own.decode_dp_rank is None:
        whole = evolve(whole, decode_worker_id=known.decode_worker_id, decode_dp_rank=known.decode_dp_rank)
    return whole
