"""Driving a graph through a trace: each request is sent when it is due, each of its tokens recorded.

    Schedule ──due──► request_of ──► graph ──items──► RequestSample
       ▲──────────────ended───────────────────────────────┘

The graph is any engine of requests in tokens. Time is the loop's, real or virtual.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
from attrs import define, field

from engines.mocker import RecordedOutputs, TimedOutput
from pipeline import Annotated, AsyncEngine, Cancelled, Context, InvalidArgument, PenstockError
from pipeline.errors import BackendUnknown, Refused
from pipeline.loop import Timer, clock
from pipeline.protocols import FinishReason, LLMEngineOutput, PreprocessedRequest, RoutingHints, StopConditions
from pipeline.protocols.openai import AgentHints

from .observe import SampleTracker, WorkerNumber
from .samples import RequestSample, Samples, Status, to_nanosecond
from .schedule import DueRequest, Schedule
from .traces import Trace

_SESSION = "X-Dynamo-Session-ID"
_POLICY_CLASS = "policy-class"
_RECORDED_OUTPUT = "output_replay_id"


def request_of(due: DueRequest, *, is_packed: bool = False) -> Context[PreprocessedRequest]:
    """Return the request in tokens, under its name in the trace, with the trace's hints for the router.

    It requires exactly the recorded number of tokens, and its recorded answer if the trace has one. Its metadata
    contain the session, if the trace names it, and the policy class. With `is_packed` the prompt is an array of u32
    instead of a list.
    """
    turn = due.turn
    metadata = {_SESSION: due.session.session_id} if due.session.is_named else {}
    if turn.policy_class is not None:
        metadata[_POLICY_CLASS] = turn.policy_class
    urgency = AgentHints(priority=turn.priority, strict_priority=turn.strict_priority)
    hints = RoutingHints(
        priority_jump=urgency.priority_jump(), strict_priority=turn.strict_priority, priority=turn.priority
    )
    request = PreprocessedRequest(
        token_ids=due.packed() if is_packed else due.token_ids(),
        stop_conditions=StopConditions(max_tokens=turn.output_tokens, min_tokens=turn.output_tokens, ignore_eos=True),
        annotations=[] if turn.recorded is None else [f"{_RECORDED_OUTPUT}:{due.name}"],
        routing=None if urgency == AgentHints() else hints,
    )
    return Context(request, id=due.name, metadata=metadata)


def recorded_outputs(trace: Trace) -> RecordedOutputs | None:
    """Return the answers of a trace by the names of its requests; None if it has none."""
    turns = [turn for session in trace.sessions for turn in session.turns]
    known = {turn.name: turn.recorded for turn in turns if turn.recorded is not None}
    return RecordedOutputs(known) if known else None


TokenGraph = AsyncEngine[PreprocessedRequest, Annotated[LLMEngineOutput]]


@define(eq=False)
class LoadDriver:
    """One pass of a schedule through a graph."""

    graph: TokenGraph
    schedule: Schedule
    samples: Samples
    """Records the requests."""
    number_of: WorkerNumber = lambda worker_id, role: worker_id
    """The number of a worker in the samples; default: its id."""
    is_packed: bool = False
    """Whether prompts are arrays, which the stages of this project take as well as lists, for less."""
    on_progress: Callable[[int], object] = lambda ended: None
    """Called after each request with the number of ended ones."""
    on_request: Callable[[RequestSample], object] = lambda sample: None
    """Called after each request with its sample."""
    _clock: Callable[[], float] = field(default=anyio.current_time, init=False)
    _began_s: float = field(default=0.0, init=False)
    _ended: int = field(default=0, init=False)
    _timer: Timer = field(factory=Timer, init=False)
    """Ends the wait for the next request that is due."""
    _awaited_ms: float | None = field(default=None, init=False)
    """When that is; None: not known."""
    _failure: Exception | None = field(default=None, init=False)
    """The first error that is not a PenstockError."""

    async def run(self) -> None:
        """Return when all requests that can be sent have ended.

        Raise the first error of the graph that is not a PenstockError, after all open streams are closed. Cancellation
        closes them too and leaves their requests unfinished.
        """
        self._clock = clock()
        self._began_s = self._clock()
        async with anyio.create_task_group() as tasks:
            while not self.schedule.finished and self._failure is None:
                for due in self.schedule.take_due(self.now_ms()):
                    tasks.start_soon(self._one, due)
                await self._until_next()
            if self._failure is not None:
                tasks.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure

    def now_ms(self) -> float:
        """Return the time since the start."""
        return (self._clock() - self._began_s) * 1000.0

    def sample_ms(self) -> float:
        """Return the same, rounded to the nanosecond as in reports; requests are sent at the exact time."""
        return to_nanosecond(self.now_ms())

    async def _until_next(self) -> None:
        """Wait until a request is due, or one has ended that has made another due, or was the last."""
        if self.schedule.finished:
            return
        self._awaited_ms = self.schedule.next_due_ms()
        self._timer = timer = Timer()  # a new one: among timers of one time it is the last
        if self._awaited_ms is None:
            await timer.wait()
        else:
            await timer.wait_until(self._began_s + self._awaited_ms / 1000.0)

    async def _one(self, due: DueRequest) -> None:
        turn = due.turn
        sample = self.samples.arrived(
            due.name,
            to_nanosecond(due.due_ms),
            input_tokens=due.input_tokens,
            wanted_output_tokens=turn.output_tokens,
            session_id=due.session.session_id if due.session.is_named else None,
            turn_index=due.turn_index,
        )
        request = request_of(due, is_packed=self.is_packed)
        request.payload.tracker = tracker = SampleTracker.of(sample, self._clock, self.sample_ms, self.number_of)
        status = Status.FAILED
        answer: list[int] = []
        try:
            answer, status = await self._answered(request, sample, tracker)
        except PenstockError as error:
            status, sample.error = _status_of(error), error.render()
        except Exception as error:
            self._failure = self._failure or error
        except BaseException:  # the replay is cancelled
            status = Status.UNFINISHED
            raise
        finally:
            now_ms = self.now_ms()
            tracker.complete_sample()
            self.samples.ended(sample, self.sample_ms(), status)
            goes_on = status in (Status.COMPLETED, Status.REJECTED)
            self.schedule.ended(due, now_ms, output_token_ids=answer, goes_on=goes_on)
            self._ended += 1
            if self.schedule.finished or self._failure or self.schedule.next_due_ms() != self._awaited_ms:
                self._timer.wake()
            self.on_progress(self._ended)
            self.on_request(sample)

    async def _answered(
        self, request: Context[PreprocessedRequest], sample: RequestSample, tracker: SampleTracker
    ) -> tuple[list[int], Status]:
        """Return the tokens of the answer and its status, read to its end. Raise the error it ends with."""
        tokens: list[int] = []
        status, sample_ms, since_ms = Status.COMPLETED, self.sample_ms, self.samples.arithmetic.since_ms
        async with await self.graph.generate(request) as stream:
            async for item in stream:
                if item.event is not None and (error := item.extract_error()) is not None:
                    raise error
                if (data := item.data) is None:
                    continue
                if data.token_ids:
                    if not tokens:
                        tracker.record_token()
                    if isinstance(data, TimedOutput):
                        sample.tokens_at(since_ms(data.token_times_s, self._began_s))
                    else:
                        sample.tokens(sample_ms(), len(data.token_ids))
                    tokens += data.token_ids
                if data.completion_usage is not None or data.routing_data is not None:
                    _record_item(data, sample, tracker)
                if data.finish_reason is not None:
                    status = _status(data.finish_reason)
                    if (message := data.error_message) is not None:
                        sample.error = BackendUnknown(message).render()
        return tokens, status


def _record_item(data: LLMEngineOutput, sample: RequestSample, tracker: SampleTracker) -> None:
    """Record what an item contains beside tokens."""
    if (usage := data.completion_usage) is not None and usage.prompt_tokens_details is not None:
        sample.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
        if sample.first_cached_tokens is None:
            sample.first_cached_tokens = sample.cached_tokens
    if data.routing_data is not None:
        tracker.record_routing(data.routing_data)


def _status_of(error: PenstockError) -> Status:
    if isinstance(error, Refused | InvalidArgument):  # no worker has room for it, or ever can
        return Status.REJECTED
    return Status.CANCELLED if isinstance(error, Cancelled) else Status.FAILED


def _status(reason: FinishReason) -> Status:
    if reason.is_error:
        return Status.FAILED
    return Status.CANCELLED if reason == FinishReason.CANCELLED else Status.COMPLETED
