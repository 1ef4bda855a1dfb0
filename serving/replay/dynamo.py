"""DynamoRecords: request traces of Dynamo's front end to sessions, each request one of its own.

Requests without agent context arrive as they did. Those with one wait for each other as it seems they had to, see
`dynamo_agents`, and come as long after that as they came. A trace has one kind of them, and one block size.

Source: dynamo lib/data-gen/src/request_trace/mooncake.rs, lower_mooncake_rows. Other than there, a request keeps its
id where it has no agent too.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from attrs import define, field

from pipeline import InvalidArgument

from .agentic import never_begin
from .dynamo_agents import dependencies
from .dynamo_records import RequestEnd, ToolEnd, read_record
from .names import unnamed_session
from .prompts import Prompt
from .trace import BadLine, Session, Turn


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
