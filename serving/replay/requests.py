"""A due request as a graph takes it."""

from __future__ import annotations

from engines.mocker import RecordedOutputs
from pipeline import Context
from pipeline.protocols import PreprocessedRequest, RoutingHints, StopConditions
from pipeline.protocols.nvext import AgentHints

from .schedule import Due
from .trace import Trace

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
