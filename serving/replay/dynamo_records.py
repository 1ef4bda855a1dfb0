"""One line of a request trace of Dynamo's front end: a request that ended, a tool that did, or nothing for a replay.

    {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": 1100,
     "agent_context": {"session_id": "a"},
     "request": {"request_id": "r", "request_received_ms": 1000, "output_tokens": 4,
                 "replay": {"trace_block_size": 2, "input_length": 3, "input_sequence_hashes": [11, 22]}}}

Source: dynamo lib/data-gen/src/request_trace/load.rs. Other than there, all that is wrong with a line is said at once,
and a line that is no object, a prompt without tokens and a negative duration are refused.
"""

from __future__ import annotations

from array import array
from math import floor
from typing import Any

from attrs import frozen

from .fields import U32_MAX, Fields, shown

SCHEMA = "dynamo.request.trace.v1"
_TOOL_ENDS = ("tool_end", "tool_error")
_EVENTS = ("request_end", "tool_start", *_TOOL_ENDS)
_MODES = ("blocking", "background")
_MS_MAX = 10**15
_U64_MAX = 2**64 - 1


@frozen
class RequestEnd:
    """A request, by the index of its line. Times are of the day, in ms.

    `hashes` say which blocks of `block_size_tokens` its prompt has, each by all up to its end; `completion` the same of
    prompt and answer, where the trace has it. Without agent context it has no session.
    """

    index: int
    request_id: str
    start_ms: int
    end_ms: int
    input_tokens: int
    output_tokens: int
    block_size_tokens: int
    hashes: array[int]
    completion: array[int] | None = None
    session_id: str | None = None
    parent_session_id: str | None = None


@frozen
class ToolEnd:
    """A tool that says what it began: it was called by one request, and another one had its result."""

    index: int
    session_id: str
    source_request_id: str
    consumer_request_id: str | None
    child_session_id: str | None


def read_record(value: Any, index: int) -> RequestEnd | ToolEnd | None:
    """What a JSON value says; None for what a replay has no use for. Raises InvalidArgument for a bad one."""
    fields = Fields(value if isinstance(value, dict) else {})
    if not isinstance(value, dict):
        fields.problem(f"it is {shown(value)}, not an object")
        fields.check()
    if (event := fields.values.get("event")) is not None:  # wrapped, as some sinks do
        if not isinstance(event, dict):
            return None
        fields = Fields(event)
    event_type = fields.values.get("event_type")
    if event_type == "request_payload":
        return None
    if (schema := fields.values.get("schema")) != SCHEMA:
        fields.problem(f"schema is {shown(schema)}, not {SCHEMA!r}")
    if event_type not in _EVENTS:
        fields.problem(f"event_type is {shown(event_type)}, not one of {', '.join(_EVENTS)}")
    fields.check()
    if event_type == "request_end":
        return _request(fields, index)
    return _tool(fields, index) if event_type in _TOOL_ENDS else None


def _request(fields: Fields, index: int) -> RequestEnd:
    request = _part(fields, "request")
    replay = _part(request, "replay")
    start_ms = _needed(request, "request_received_ms", high=_MS_MAX)
    event_ms, total_ms = _needed(fields, "event_time_unix_ms", high=_MS_MAX), request.number("total_time_ms")
    session_id, parent_id = _session(fields)
    found = RequestEnd(
        index=index,
        request_id=_name(request, "request_id"),
        start_ms=start_ms,
        end_ms=max(start_ms, event_ms) if total_ms is None else start_ms + floor(total_ms + 0.5),
        input_tokens=_needed(replay, "input_length", low=1),
        output_tokens=_needed(request, "output_tokens"),
        block_size_tokens=_needed(replay, "trace_block_size", low=1),
        hashes=_hashes(replay, "input_sequence_hashes") or array("Q"),
        completion=_hashes(replay, "completion_sequence_hashes", is_needed=False),
        session_id=session_id,
        parent_session_id=parent_id,
    )
    fields.check()
    _check_hashes(fields, found)
    fields.check()
    return found


def _check_hashes(fields: Fields, found: RequestEnd) -> None:
    """There is a hash for each block, begun ones too, and the answer comes behind the prompt."""
    size = found.block_size_tokens
    blocks = -(-found.input_tokens // size)
    if len(found.hashes) != blocks:
        fields.problem(
            f"input_length {found.input_tokens} in blocks of {size} needs {blocks} input_sequence_hashes, "
            f"there are {len(found.hashes)}"
        )
    if found.completion is None:
        return
    whole, blocks = found.input_tokens // size, -(-(found.input_tokens + found.output_tokens) // size)
    if len(found.completion) != blocks:
        fields.problem(
            f"with the answer it needs {blocks} completion_sequence_hashes, there are {len(found.completion)}"
        )
    elif found.completion[:whole] != found.hashes[:whole]:
        fields.problem("completion_sequence_hashes do not begin with the whole blocks of the prompt")


def _tool(fields: Fields, index: int) -> ToolEnd | None:
    """A tool that says nothing of requests is in the times between them already."""
    tool = fields.values.get("tool")
    claude = tool.get("claude") if isinstance(tool, dict) else None
    session_id, _ = _session(fields)
    if session_id is None or claude is None:
        fields.check()
        return None
    known = _part(Fields({"claude": claude}, fields.problems), "claude")
    if (mode := known.values.get("execution_mode")) not in _MODES:
        fields.problem(f"execution_mode is {shown(mode)}, not one of {', '.join(_MODES)}")
    found = ToolEnd(
        index,
        session_id,
        _name(known, "source_request_id"),
        known.text("consumer_request_id"),
        known.text("child_session_id"),
    )
    fields.check()
    return found


def _session(fields: Fields) -> tuple[str | None, str | None]:
    """The session of the agent, and of who called it."""
    if fields.values.get("agent_context") is None:
        return None, None
    context = _part(fields, "agent_context")
    return _name(context, "session_id"), context.text("parent_session_id")


def _part(fields: Fields, name: str) -> Fields:
    """An object inside; what is wrong with it is wrong with all."""
    value = fields.values.get(name)
    if not isinstance(value, dict):
        fields.problem(f"{name} is missing" if value is None else f"{name} is {shown(value)}, not an object")
    return Fields(value if isinstance(value, dict) else {}, fields.problems)


def _needed(fields: Fields, name: str, *, low: int = 0, high: int = U32_MAX) -> int:
    value = fields.whole(name, low=low, high=high)
    if fields.values.get(name) is None:
        fields.problem(f"{name} is missing")
    return low if value is None else value


def _name(fields: Fields, name: str) -> str:
    value = fields.text(name)
    if value is None and not fields.is_given(name):
        fields.problem(f"{name} is missing")
    return value or ""


def _hashes(fields: Fields, name: str, *, is_needed: bool = True) -> array[int] | None:
    """Whole numbers of 64 bits."""
    value = fields.values.get(name)
    if isinstance(value, list) and all(type(one) is int and 0 <= one <= _U64_MAX for one in value):
        return array("Q", value)
    if value is not None:
        fields.problem(f"{name} is not a list of whole numbers of 64 bits")
    elif is_needed:
        fields.problem(f"{name} is missing")
    return None
