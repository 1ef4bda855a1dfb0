"""DynamoRecords: request traces of Dynamo's front end to sessions, each request one of its own.

Requests without agent context arrive as they did. Those with one wait for each other as it seems they had to, see
`dynamo_agents`, and come as long after that as they came. A trace has one kind of them, and one block size.

Source: dynamo lib/data-gen/src/request_trace/mooncake.rs, lower_mooncake_rows. Other than there, a request keeps its
id where it has no agent too.

One line of a request trace of Dynamo's front end: a request that ended, a tool that did, or nothing for a replay.

    {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": 1100,
     "agent_context": {"session_id": "a"},
     "request": {"request_id": "r", "request_received_ms": 1000, "output_tokens": 4,
                 "replay": {"trace_block_size": 2, "input_length": 3, "input_sequence_hashes": [11, 22]}}}

Source: dynamo lib/data-gen/src/request_trace/load.rs. Other than there, all that is wrong with a line is said at once,
and a line that is no object, a prompt without tokens and a negative duration are refused.

Which requests of agents waited for which, as far as a trace shows it.

    session     r1 ──► r2 ──► r3           each waits for the one before
    child       r1 ──► c1 ... c2 ──► r3    its first for the parent's latest before it began, and the parent's next
                                           behind its end for the one of them that ended last

Where a tool says which request called it and which had its result, it is these two.

Source: dynamo lib/data-gen/src/request_trace/agentic.rs, lower_agentic_mooncake_rows. Other than there, what tools took
is not told apart from other time between two requests: a replay waits for the sum of both.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import floor
from typing import Any

from attrs import define, field, frozen

from pipeline import InvalidArgument

from .fields import U32_MAX, Fields, shown
from .mooncake import never_begin, unnamed_session
from .trace import BadLine, Prompt, Session, Turn

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


_BySession = Mapping[str, Sequence[RequestEnd]]


def dependencies(
    requests: Sequence[RequestEnd], tools: Iterable[ToolEnd], parents: Mapping[str, str]
) -> tuple[dict[str, tuple[str, ...]], list[BadLine]]:
    """The names that each request waits for, and the tools that cannot be. Requests come in order; `parents` has the
    session that called a session."""
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
            spawn, join = launches.get(child) or _seen(by_session[child], by_session[parent])
            if spawn is not None:
                waits[by_session[child][0].request_id].append(spawn)
            if join is not None:
                waits[join].append(_last_to_end(by_session[child]).request_id)
    return {name: tuple(dict.fromkeys(names)) for name, names in waits.items()}, bad


def _launches(
    requests: Sequence[RequestEnd], tools: Iterable[ToolEnd], by_session: _BySession, parents: Mapping[str, str]
) -> tuple[dict[str, tuple[str | None, str | None]], list[BadLine]]:
    """The two requests that tools name for each child session, and the tools with which something is wrong."""
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


def _seen(child: Sequence[RequestEnd], parent: Sequence[RequestEnd]) -> tuple[str | None, str | None]:
    """The two requests of the parent as their times show them."""
    end_ms = _last_to_end(child).end_ms
    before = [one.request_id for one in parent if one.start_ms <= child[0].start_ms]
    behind = [one.request_id for one in parent if one.start_ms >= end_ms]
    return before[-1] if before else None, behind[0] if behind else None


def _last_to_end(requests: Sequence[RequestEnd]) -> RequestEnd:
    return max(requests, key=lambda one: (one.end_ms, one.start_ms, one.request_id))


@define
class DynamoRecords:
    """The lines of all shards. `block_size_tokens` is that of the trace, if somebody says so."""

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
        """Raises InvalidArgument for what does not go with the lines before."""
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
        """All sessions, in the order in which their requests came."""
        requests = sorted(self._requests.values(), key=lambda one: (one.start_ms, one.end_ms, one.request_id))
        waits, bad = dependencies(requests, self._tools, self._parents)
        ends_ms = {one.request_id: one.end_ms for one in requests}
        ids = _Ids(requests)
        turns = [_turn(one, ids, waits.get(one.request_id, ()), ends_ms) for one in requests]
        stuck = {one.line for one in never_begin(turns)}
        first_ms = requests[0].start_ms if requests else 0
        return [
            Session(
                unnamed_session(turn.line, set()) if one.session_id is None else one.session_id,
                (turn,),
                None if turn.wait_for else float(one.start_ms - first_ms),
                one.session_id is not None,
            )
            for one, turn in zip(requests, turns, strict=True)
            if turn.line not in stuck
        ], [*bad, *(BadLine(line, "it waits in a circle, or for one that does") for line in stuck)]


class _Ids:
    """Small ids for hashes: those of prompts in the order of the requests, then those of answers as they are asked."""

    def __init__(self, requests: Iterable[RequestEnd]) -> None:
        self._known: dict[int, int] = {}
        for one in requests:
            self.of(one.hashes)

    def of(self, hashes: Iterable[int]) -> array[int]:
        known = self._known
        return array("I", [known.setdefault(one, len(known)) for one in hashes])


def _turn(one: RequestEnd, ids: _Ids, wait_for: Iterable[str], ends_ms: dict[str, int]) -> Turn:
    wait_for = tuple(wait_for)
    prompt, recorded = _tokens(one, ids)
    delay_ms = max(0, one.start_ms - max(ends_ms[name] for name in wait_for)) if wait_for else 0
    return Turn(
        name=one.request_id,
        line=one.index + 1,
        prompt=prompt,
        output_tokens=one.output_tokens,
        delay_ms=float(delay_ms),
        recorded=recorded,
        wait_for=wait_for,
    )


def _tokens(one: RequestEnd, ids: _Ids) -> tuple[Prompt, array[int] | None]:
    """The prompt, and the answer where it is known: with it a block that the prompt only began is another one."""
    size, blocks = one.block_size_tokens, ids.of(one.hashes)
    if one.completion is None or not one.output_tokens:
        return Prompt.of(blocks, size, one.input_tokens), None
    all_blocks, begun = ids.of(one.completion), one.input_tokens // size
    blocks[begun:] = all_blocks[begun : len(blocks)]
    positions = range(one.input_tokens, one.input_tokens + one.output_tokens)
    return Prompt.of(blocks, size, one.input_tokens), array("I", [all_blocks[at // size] for at in positions])
