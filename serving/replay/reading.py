"""Reading trace files: lines to rows to sessions, and every bad line by its number.

Source: dynamo lib/mocker/src/loadgen/trace.rs, Trace::from_mooncake. Other than there, a file is read to its end before
what is wrong with it is said, bad lines can be left out, and a session that has no name is never one with a name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, cast

from attrs import evolve

from pipeline import InvalidArgument, codec

from .agentic import AgenticRows, never_begin
from .applied import SessionLines
from .prompts import check_block_size
from .sessions import SessionRows
from .trace import BadLine, Session, Trace, TraceFormat

_FIELD = "trace"
_SHOWN_LINES = 20


class Reader(Protocol):
    """What makes sessions of the lines of one format."""

    def add(self, value: Any, index: int) -> None:
        """Takes the value of the line with that index from 0. Raises InvalidArgument for a bad one."""
        ...

    def finish(self) -> tuple[list[Session], list[BadLine]]:
        """All sessions, and the lines that turned out to be bad after all."""
        ...


def read_trace(
    path: str | Path,
    trace_format: TraceFormat | str = TraceFormat.MOONCAKE,
    *,
    trace_block_size: int = 512,
    skip_bad: bool = False,
    shared_prefix_ratio: float = 0.0,
    num_prefix_groups: int = 0,
) -> Trace:
    """All sessions of a file. The last two settings are for applied_compute_agentic only.

    Raises InvalidArgument for a file that cannot be read or has no request, for a format that is not known or not
    built, and for bad lines: each with its number and all that is wrong with it. With `skip_bad` those are left out.
    """
    check_block_size(trace_block_size)
    reader, kind = _reader(trace_format, trace_block_size, shared_prefix_ratio, num_prefix_groups)
    sessions, bad = _read(path, reader)
    if bad and not skip_bad:
        raise InvalidArgument(_all_bad(path, bad), field=_FIELD)
    if not sessions:
        skipped = f", {len(bad)} bad lines were left out" if bad else ""
        raise InvalidArgument(f"{path}: there is no request{skipped}", field=_FIELD)
    return Trace(tuple(sessions), kind, tuple(bad))


def _read(path: str | Path, reader: Reader) -> tuple[list[Session], list[BadLine]]:
    """All sessions, and all bad lines in order."""
    bad: list[BadLine] = []
    for index, line in _lines(path):
        try:
            reader.add(codec.from_json(line, cast(type[Any], Any)), index)
        except InvalidArgument as error:
            bad.append(BadLine(index + 1, str(error)))
    sessions, bad_after_all = reader.finish()
    return sessions, sorted([*bad, *bad_after_all], key=lambda one: one.line)


def _reader(
    trace_format: TraceFormat | str, block_size: int, shared_prefix_ratio: float, num_prefix_groups: int
) -> tuple[Reader, TraceFormat]:
    try:
        kind = TraceFormat(trace_format)
    except ValueError as error:
        known = ", ".join(TraceFormat)
        raise InvalidArgument(f"must be one of {known}, got {trace_format!r}", field="trace_format") from error
    if kind is TraceFormat.DYNAMO:
        raise InvalidArgument("traces of the format dynamo cannot be read yet", field="trace_format")
    if kind is TraceFormat.APPLIED_COMPUTE_AGENTIC:
        return SessionLines(block_size, shared_prefix_ratio, num_prefix_groups), kind
    if shared_prefix_ratio or num_prefix_groups:
        raise InvalidArgument(f"a {kind} trace has its own prefixes", field="shared_prefix_ratio")
    return (AgenticRows if kind is TraceFormat.AGENTIC_MOONCAKE else SessionRows)(block_size), kind


def _lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """The lines that have something on them, with their index from 0."""
    try:
        with Path(path).open("rb") as file:
            for index, line in enumerate(file):
                text = line.removeprefix(b"\xef\xbb\xbf") if index == 0 else line
                if text.strip():
                    yield index, text
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror or error}", field=_FIELD, cause=error) from error
    except ValueError as error:  # a path with a zero byte
        raise InvalidArgument(f"{str(path)!r} is no path: {error}", field=_FIELD, cause=error) from error


def _all_bad(path: str | Path, bad: list[BadLine]) -> str:
    lines = [str(one) for one in bad[:_SHOWN_LINES]]
    if len(bad) > _SHOWN_LINES:
        lines.append(f"and {len(bad) - _SHOWN_LINES} more bad lines")
    return f"{path}: " + "\n".join(lines)


def first_requests(trace: Trace, count: int) -> Trace:
    """The sessions that hold the first `count` requests, in the order of sessions; the last one is cut.

    What waits for a request that is cut is left out with it.
    """
    kept: list[Session] = []
    for session in trace.sessions:
        turns = session.turns[: max(0, count)]
        count -= len(turns)
        if turns:
            kept.append(evolve(session, turns=turns))
    waiting = {bad.line for bad in never_begin([turn for session in kept for turn in session.turns])}
    return evolve(trace, sessions=tuple(one for one in kept if one.turns[0].line not in waiting))
