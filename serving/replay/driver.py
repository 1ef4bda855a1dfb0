"""Driving a graph through a trace: each request when it is due, each token noted as it comes.

    Schedule ──due──► request_of ──► graph ──items──► RequestSample
       ▲──────────────ended───────────────────────────────┘

The graph is any engine that takes requests in tokens. Time is the loop's: in virtual time nothing waits.

A due request as a graph takes it.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
from attrs import define, field

from engines.mocker import RecordedOutputs
from pipeline import Annotated, AsyncEngine, Cancelled, Context, InvalidArgument, PenstockError
from pipeline.errors import BackendUnknown, Refused
from pipeline.loop import clock
from pipeline.protocols import FinishReason, LLMEngineOutput, PreprocessedRequest, RoutingHints, StopConditions
from pipeline.protocols.openai import AgentHints

from .observe import Numbered, SampleTracker
from .samples import RequestSample, Samples, Status, to_nanosecond
from .schedule import Due, Schedule
from .traces import Trace

_SESSION = "X-Dynamo-Session-ID"
_POLICY_CLASS = "policy-class"
_RECORDED_OUTPUT = "output_replay_id"


def request_of(due: Due, *, model: str = "") -> Context[PreprocessedRequest]:
    """The request in tokens, under its name in the trace, with the trace's hints for the router.

    It asks for exactly as many tokens as the trace says, and for its recorded answer where there is one. Metadata name
    its session, if the trace does, and its queue class.
    """
    turn = due.turn
    metadata = {_SESSION: due.session.session_id} if due.session.is_named else {}
    if turn.policy_class is not None:
        metadata[_POLICY_CLASS] = turn.policy_class
    urgency = AgentHints(priority=turn.priority, strict_priority=turn.strict_priority)
    request = PreprocessedRequest(
        token_ids=due.token_ids(),
        model=model,
        stop_conditions=StopConditions(max_tokens=turn.output_tokens, min_tokens=turn.output_tokens, ignore_eos=True),
        annotations=[] if turn.recorded is None else [f"{_RECORDED_OUTPUT}:{due.name}"],
        routing=None if urgency == AgentHints() else _hints(urgency),
    )
    return Context(request, id=due.name, metadata=metadata)


def recorded_outputs(trace: Trace) -> RecordedOutputs | None:
    """The answers that a trace has, by the names its requests ask for them; None: it has none."""
    turns = [turn for session in trace.sessions for turn in session.turns]
    known = {turn.name: turn.recorded for turn in turns if turn.recorded is not None}
    return RecordedOutputs(known) if known else None


def _hints(urgency: AgentHints) -> RoutingHints:
    return RoutingHints(
        priority_jump=urgency.priority_jump(),
        strict_priority=urgency.strict_priority,
        priority=urgency.priority,
    )


TokenGraph = AsyncEngine[PreprocessedRequest, Annotated[LLMEngineOutput]]


@define(eq=False)
class Drive:
    """One pass of a schedule through a graph. `number_of` names workers; without it they are what the graph says.

    `heard` is called after every request that ended, with how many have; `noted` with what was noted of it.
    """

    graph: TokenGraph
    schedule: Schedule
    samples: Samples
    model: str = ""
    number_of: Numbered = lambda worker_id, role: worker_id
    heard: Callable[[int], object] = lambda ended: None
    noted: Callable[[RequestSample], object] = lambda sample: None
    _clock: Callable[[], float] = field(default=anyio.current_time, init=False)
    _began_s: float = field(default=0.0, init=False)
    _ended: int = field(default=0, init=False)
    _news: anyio.Event = field(factory=anyio.Event, init=False)
    _failure: Exception | None = field(default=None, init=False)
    """The first that was no error of ours."""

    async def run(self) -> None:
        """Returns when every request that can be sent has ended. What a graph raises that is no error of ours is
        raised, once all that is open is closed; cancelled, it closes that too and leaves it unfinished."""
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
        """Since the beginning."""
        return (self._clock() - self._began_s) * 1000.0

    def noted_ms(self) -> float:
        """The same as a report has it; requests are sent by the exact time."""
        return to_nanosecond(self.now_ms())

    async def _until_next(self) -> None:
        """Until a request is due, or one has ended, which may make another due."""
        next_ms = self.schedule.next_due_ms()
        deadline_s = float("inf") if next_ms is None else self._began_s + next_ms / 1000.0
        if self.schedule.finished:
            return
        self._news = anyio.Event()
        with anyio.CancelScope(deadline=deadline_s):
            await self._news.wait()

    async def _one(self, due: Due) -> None:
        turn = due.turn
        sample = self.samples.arrived(
            due.name,
            to_nanosecond(due.due_ms),
            input_tokens=due.input_tokens,
            wanted_output_tokens=turn.output_tokens,
            session_id=due.session.session_id if due.session.is_named else None,
            turn_index=due.turn_index,
        )
        request = request_of(due, model=self.model)
        request.payload.tracker = tracker = SampleTracker.of(sample, self.noted_ms, self.number_of)
        status = Status.FAILED
        said: list[int] = []
        try:
            said, status = await self._answered(request, sample, tracker)
        except PenstockError as error:
            status, sample.error = _status_of(error), error.render()
        except Exception as error:
            self._failure = self._failure or error
        except BaseException:  # we are cancelled
            status = Status.UNFINISHED
            raise
        finally:
            now_ms = self.now_ms()
            tracker.note()
            self.samples.ended(sample, self.noted_ms(), status)
            goes_on = status in (Status.COMPLETED, Status.REJECTED)
            self.schedule.ended(due, now_ms, output_token_ids=said, goes_on=goes_on)
            self._ended += 1
            self._news.set()
            self.heard(self._ended)
            self.noted(sample)

    async def _answered(
        self, request: Context[PreprocessedRequest], sample: RequestSample, tracker: SampleTracker
    ) -> tuple[list[int], Status]:
        """Reads the answer to its end; its tokens, and how it says it ended. Raises the error it ends with."""
        said: list[int] = []
        status, noted_ms = Status.COMPLETED, self.noted_ms
        async with await self.graph.generate(request) as stream:
            async for item in stream:
                if item.event is not None and (error := item.extract_error()) is not None:
                    raise error
                if (data := item.data) is None:
                    continue
                if data.token_ids:
                    if not said:
                        tracker.record_token()
                    sample.tokens(noted_ms(), len(data.token_ids))
                    said += data.token_ids
                if data.completion_usage is not None or data.routing_data is not None:
                    _note(data, sample, tracker)
                if data.finish_reason is not None:
                    status = _status(data.finish_reason)
                    if (message := data.error_message) is not None:
                        sample.error = BackendUnknown(message).render()
        return said, status


def _note(data: LLMEngineOutput, sample: RequestSample, tracker: SampleTracker) -> None:
    """What an item tells of its request beside tokens."""
    if (usage := data.completion_usage) is not None and usage.prompt_tokens_details is not None:
        sample.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
        if sample.first_cached_tokens is None:
            sample.first_cached_tokens = sample.cached_tokens
    if data.routing_data is not None:
        tracker.heard(data.routing_data)


def _status_of(error: PenstockError) -> Status:
    if isinstance(error, Refused | InvalidArgument):  # nobody has room for it, or ever will
        return Status.REJECTED
    return Status.CANCELLED if isinstance(error, Cancelled) else Status.FAILED


def _status(reason: FinishReason) -> Status:
    if reason.is_error:
        return Status.FAILED
    return Status.CANCELLED if reason == FinishReason.CANCELLED else Status.COMPLETED
