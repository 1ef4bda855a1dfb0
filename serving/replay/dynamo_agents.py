"""Which requests of agents waited for which, as far as a trace shows it.

    session     r1 ──► r2 ──► r3           each waits for the one before
    child       r1 ──► c1 ... c2 ──► r3    its first for the parent's latest before it began, and the parent's next
                                           behind its end for the one of them that ended last

Where a tool says which request called it and which had its result, it is these two.

Source: dynamo lib/data-gen/src/request_trace/agentic.rs, lower_agentic_mooncake_rows. Other than there, what tools took
is not told apart from other time between two requests: a replay waits for the sum of both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from .dynamo_records import RequestEnd, ToolEnd
from .trace import BadLine

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
