"""Request traces of Dynamo's front end: records of requests and tools to sessions, each request a session of its own.

    {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": 1100,
     "agent_context": {"session_id": "a"},
     "request": {"request_id": "r", "request_received_ms": 1000, "output_tokens": 4,
                 "replay": {"trace_block_size": 2, "input_length": 3, "input_sequence_hashes": [11, 22]}}}

Requests without agent context keep their recorded arrivals. Requests with agent context wait for each other, and are
sent with the recorded delay after the last one they wait for:

    session     r1 ──► r2 ──► r3           each waits for the one before
    child       r1 ──► c1 ... c2 ──► r3    its first for the parent's latest before it began, and the parent's next
                                           after its end for the child's last to end

A tool record that names its calling and its consuming request replaces these two. All requests of a trace have an agent
context, or none has; all have one block size.

Source: dynamo lib/data-gen/src/request_trace/load.rs. Other than there, all problems of a line are reported at once,
and a line that is not an object, a prompt without tokens and a negative duration are refused.
Source: dynamo lib/data-gen/src/request_trace/mooncake.rs, lower_mooncake_rows. Other than there, a request without
agent keeps its id.
Source: dynamo lib/data-gen/src/request_trace/agentic.rs, lower_agentic_mooncake_rows. Other than there, the time of
tools is not separate from other time between two requests: a replay waits for the sum of both.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count, pairwise
from math import floor
from typing import Any

from attrs import define, field, frozen

from pipeline import InvalidArgument

from .fields import Fields, shown
from .mooncake import never_begin, session_of
from .trace import BadLine, Prompt, Session, Turn

SCHEMA = "dynamo.request.trace.v1"
_TOOL_ENDS = ("tool_end", "tool_error")
_EVENTS = ("request_end", "tool_start", *_TOOL_ENDS)
_MODES = ("blocking", "background")
_MS_MAX = 10**15


@frozen
class RequestEnd:
    """The record of a request that ended."""

    index: int
    """Of its line, from 0."""
    request_id: str
    start_ms: int
    """Unix time."""
    end_ms: int
    """Unix time."""
    input_tokens: int
    output_tokens: int
    block_size_tokens: int
    hashes: array[int]
    """Of the blocks of its prompt, each of all tokens up to the block's end."""
    completion: array[int] | None = None
    """The same of prompt and answer; None if the trace lacks it."""
    session_id: str | None = None
    """None without agent context."""
    parent_session_id: str | None = None
    """The session that called this one."""


@frozen
class ToolEnd:
    """The record of a tool that names its requests."""

    index: int
    """Of its line, from 0."""
    session_id: str
    source_request_id: str
    """The request that called it."""
    consumer_request_id: str | None
    """The request that got its result."""
    child_session_id: str | None
    """The session it began."""


def read_record(value: Any, index: int) -> RequestEnd | ToolEnd | None:
    """Return the record of a JSON value; None for a kind that a replay ignores. Raise InvalidArgument if invalid."""
    fields = Fields.of(value)
    if (event := fields.values.get("event")) is not None:  # some sinks wrap the record
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
    request = fields.part("request")
    replay = request.part("replay")
    start_ms = request.needed("request_received_ms", high=_MS_MAX)
    event_ms, total_ms = fields.needed("event_time_unix_ms", high=_MS_MAX), request.number("total_time_ms")
    session_id, parent_id = _session(fields)
    found = RequestEnd(
        index=index,
        request_id=request.name("request_id"),
        start_ms=start_ms,
        end_ms=max(start_ms, event_ms) if total_ms is None else start_ms + floor(total_ms + 0.5),
        input_tokens=replay.needed("input_length", low=1),
        output_tokens=request.needed("output_tokens"),
        block_size_tokens=replay.needed("trace_block_size", low=1),
        hashes=replay.hashes("input_sequence_hashes", is_needed=True) or array("Q"),
        completion=replay.hashes("completion_sequence_hashes"),
        session_id=session_id,
        parent_session_id=parent_id,
    )
    fields.check()
    _check_hashes(fields, found)
    fields.check()
    return found


def _check_hashes(fields: Fields, found: RequestEnd) -> None:
    """Note a problem unless each block has a hash, the last partial one too, and the answer follows the prompt."""
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
    """Return the record; None for a tool that names no requests: the times between requests contain it."""
    tool = fields.values.get("tool")
    claude = tool.get("claude") if isinstance(tool, dict) else None
    session_id, _ = _session(fields)
    if session_id is None or claude is None:
        fields.check()
        return None
    known = Fields({"claude": claude}, fields.problems).part("claude")
    if (mode := known.values.get("execution_mode")) not in _MODES:
        fields.problem(f"execution_mode is {shown(mode)}, not one of {', '.join(_MODES)}")
    found = ToolEnd(
        index,
        session_id,
        known.name("source_request_id"),
        known.text("consumer_request_id"),
        known.text("child_session_id"),
    )
    fields.check()
    return found


def _session(fields: Fields) -> tuple[str | None, str | None]:
    """Return the session of the agent, and the session that called it."""
    if fields.values.get("agent_context") is None:
        return None, None
    context = fields.part("agent_context")
    return context.name("session_id"), context.text("parent_session_id")


_BySession = Mapping[str, Sequence[RequestEnd]]


def dependencies(
    requests: Sequence[RequestEnd], tools: Iterable[ToolEnd], parents: Mapping[str, str]
) -> tuple[dict[str, tuple[str, ...]], list[BadLine]]:
    """Return the names that each request waits for, and the invalid tools.

    `requests` are in order of time. `parents` maps a session to the one that called it.
    """
    by_session: defaultdict[str, list[RequestEnd]] = defaultdict(list)
    for one in requests:
        if one.session_id is not None:
            by_session[one.session_id].append(one)
    launches, bad = _launches(requests, tools, by_session, parents)
    waits: defaultdict[str, list[str]] = defaultdict(list)
    for turns in by_session.values():
        for before, one in pairwise(turns):
            waits[one.request_id].append(before.request_id)
    for child, parent in parents.items():
        if child in by_session and parent in by_session:
            spawn, join = launches.get(child) or _from_times(by_session[child], by_session[parent])
            if spawn is not None:
                waits[by_session[child][0].request_id].append(spawn)
            if join is not None:
                waits[join].append(_last_to_end(by_session[child]).request_id)
    return {name: tuple(dict.fromkeys(names)) for name, names in waits.items()}, bad


def _launches(
    requests: Sequence[RequestEnd], tools: Iterable[ToolEnd], by_session: _BySession, parents: Mapping[str, str]
) -> tuple[dict[str, tuple[str | None, str | None]], list[BadLine]]:
    """Return the calling and consuming request that tools name for each child session, and the invalid tools."""
    sessions = {one.request_id: one.session_id for one in requests}
    found: dict[str, tuple[str | None, str | None]] = {}
    bad = []
    for tool in tools:
        child = tool.child_session_id
        if problem := _problem(tool, sessions, parents):
            bad.append(BadLine(tool.index + 1, problem))
        elif child in found:
            bad.append(BadLine(tool.index + 1, f"another tool has begun session {child!r} already"))
        elif child is not None and child in by_session:
            found[child] = tool.source_request_id, tool.consumer_request_id
    return found, bad


def _problem(tool: ToolEnd, sessions: Mapping[str, str | None], parents: Mapping[str, str]) -> str:
    for name in filter(None, (tool.source_request_id, tool.consumer_request_id)):
        if name not in sessions:
            return f"{name!r} is no request of this trace"
        if sessions[name] != tool.session_id:
            return f"request {name!r} is of session {sessions[name]!r}, not of {tool.session_id!r}"
    parent = parents.get(tool.child_session_id or "", tool.session_id)
    return "" if parent == tool.session_id else f"session {tool.child_session_id!r} is of {parent!r}"


def _from_times(child: Sequence[RequestEnd], parent: Sequence[RequestEnd]) -> tuple[str | None, str | None]:
    """Return the calling and consuming request of the parent, derived from their times."""
    end_ms = _last_to_end(child).end_ms
    before = [one.request_id for one in parent if one.start_ms <= child[0].start_ms]
    behind = [one.request_id for one in parent if one.start_ms >= end_ms]
    return before[-1] if before else None, behind[0] if behind else None


def _last_to_end(requests: Sequence[RequestEnd]) -> RequestEnd:
    return max(requests, key=lambda one: (one.end_ms, one.start_ms, one.request_id))


@define
class DynamoRecords:
    """Sessions from the records of all files. `block_size_tokens` is the expected one, None for that of the trace."""

    block_size_tokens: int | None = None
    _requests: dict[str, RequestEnd] = field(factory=dict)
    _tools: list[ToolEnd] = field(factory=list)
    _parents: dict[str, str] = field(factory=dict)

    def add(self, value: object, index: int) -> None:
        record = read_record(value, index)
        if isinstance(record, ToolEnd):
            self._tools.append(record)
        elif record is not None:
            self._check(record)
            self._requests[record.request_id] = record
            if record.session_id is not None and record.parent_session_id is not None:
                self._parents[record.session_id] = record.parent_session_id

    def _check(self, record: RequestEnd) -> None:
        """Raise InvalidArgument if the record contradicts the lines before."""
        if record.request_id in self._requests:
            raise InvalidArgument(f"there is a request {record.request_id!r} already")
        if self.block_size_tokens not in (None, record.block_size_tokens):
            raise InvalidArgument(
                f"trace_block_size is {record.block_size_tokens}, that of all is to be {self.block_size_tokens}"
            )
        parent = self._parents.get(record.session_id or "")
        if parent is not None and record.parent_session_id not in (None, parent):
            raise InvalidArgument(
                f"parent_session_id is {record.parent_session_id!r}, that of its session is {parent!r}"
            )
        first = next(iter(self._requests.values()), None)
        if first is not None and (first.session_id is None) is not (record.session_id is None):
            has = "no agent_context" if record.session_id is None else "an agent_context"
            raise InvalidArgument(f"it has {has}, other than the requests before it: a trace has one kind")
        self.block_size_tokens = record.block_size_tokens

    def finish(self) -> tuple[list[Session], list[BadLine]]:
        """Return all sessions in the order of their requests' starts, and the invalid lines."""
        requests = sorted(self._requests.values(), key=lambda one: (one.start_ms, one.end_ms, one.request_id))
        waits, bad = dependencies(requests, self._tools, self._parents)
        ends_ms = {one.request_id: one.end_ms for one in requests}
        ids: defaultdict[int, int] = defaultdict(count().__next__)
        for one in requests:  # first those of prompts in the order of requests, then those of answers on demand
            _small(one.hashes, ids)
        turns = [_turn(one, ids, waits.get(one.request_id, ()), ends_ms) for one in requests]
        stuck = {one.line for one in never_begin(turns)}
        first_ms = requests[0].start_ms if requests else 0
        return [
            session_of(one.session_id, (turn,), None if turn.wait_for else float(one.start_ms - first_ms))
            for one, turn in zip(requests, turns, strict=True)
            if turn.line not in stuck
        ], [*bad, *(BadLine(line, "it waits in a circle, or for one that does") for line in stuck)]


def _small(hashes: Iterable[int], ids: Mapping[int, int]) -> array[int]:
    """Return small ids for hashes: the same for the same hash."""
    return array("I", map(ids.__getitem__, hashes))


def _turn(one: RequestEnd, ids: Mapping[int, int], wait_for: tuple[str, ...], ends_ms: Mapping[str, int]) -> Turn:
    prompt, recorded = _tokens(one, ids)
    delay_ms = max(0, one.start_ms - max(ends_ms[name] for name in wait_for)) if wait_for else 0
    return Turn(
        one.request_id,
        one.index + 1,
        prompt,
        one.output_tokens,
        float(delay_ms),
        recorded=recorded,
        wait_for=wait_for,
    )


def _tokens(one: RequestEnd, ids: Mapping[int, int]) -> tuple[Prompt, array[int] | None]:
    """Return the prompt, and the answer if recorded: then the block that both share gets the id from the answer."""
    size, blocks = one.block_size_tokens, _small(one.hashes, ids)
    if one.completion is None or not one.output_tokens:
        return Prompt.of(blocks, size, one.input_tokens), None
    all_blocks, whole = _small(one.completion, ids), one.input_tokens // size
    blocks[whole:] = all_blocks[whole : len(blocks)]
    positions = range(one.input_tokens, one.input_tokens + one.output_tokens)
    return Prompt.of(blocks, size, one.input_tokens), array("I", [all_blocks[at // size] for at in positions])
