"""Reading trace files, compressed ones too: lines to sessions, and each invalid line by its number.

Source: dynamo lib/mocker/src/loadgen/trace.rs, Trace::from_mooncake. Other than there, a file is read to its end before
its problems are reported, invalid lines can be skipped, and a session without a name never gets that of another one.
"""

from __future__ import annotations

import gzip
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from attrs import evolve

from pipeline import InvalidArgument, wire

from .applied_compute import SessionLines
from .dynamo import DynamoRecords
from .mooncake import AgenticRows, SessionRows, never_begin
from .trace import BLOCK_TOKENS, BadLine, Session, Trace, TraceFormat, check_block_size

_FIELD = "trace"
_SHOWN_LINES = 20
"""Bad lines that an error lists."""


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank with their numbers from 1; a file `.gz` is decompressed.

    Raise InvalidArgument if the file cannot be read to its end.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if text.strip():
                    yield number, text
    except (EOFError, zlib.error) as error:
        raise InvalidArgument(f"cannot read {path}: {error}", field=_FIELD, cause=error) from error
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror or error}", field=_FIELD, cause=error) from error
    except ValueError as error:  # a path with a zero byte
        raise InvalidArgument(f"{str(path)!r} is no path: {error}", field=_FIELD, cause=error) from error


class Reader(Protocol):
    """Makes sessions from the lines of one format."""

    def add(self, value: Any, index: int) -> None:
        """Add the value of the line with that index, from 0. Raise InvalidArgument if it is invalid."""
        ...

    def finish(self) -> tuple[list[Session], list[BadLine]]:
        """Return all sessions, and the lines that are invalid in view of the whole trace."""
        ...


def read_trace(
    path: Path | str | Sequence[Path | str],
    trace_format: TraceFormat | str = TraceFormat.MOONCAKE,
    *,
    trace_block_size: int | None = None,
    skip_bad: bool = False,
    shared_prefix_ratio: float = 0.0,
    num_prefix_groups: int = 0,
) -> Trace:
    """Return the trace of a file, or of several of the format dynamo; a file `.gz` is decompressed.

    `trace_block_size` is the number of tokens of a hash id, default 512, or that of a dynamo trace. `skip_bad` skips
    invalid lines. `shared_prefix_ratio` and `num_prefix_groups` are for applied_compute_agentic only: see
    `SessionLines`. Raise InvalidArgument if a file cannot be read or has no request, for an unknown format, and for
    invalid lines: each with its number and all its problems.
    """
    paths = [Path(path)] if isinstance(path, str | Path) else [Path(one) for one in path]
    if trace_block_size is not None:
        check_block_size(trace_block_size)
    reader, kind = _reader(trace_format, trace_block_size, shared_prefix_ratio, num_prefix_groups)
    if len(paths) != 1 and (kind is not TraceFormat.DYNAMO or not paths):
        raise InvalidArgument(f"a {kind} trace is one file, not {len(paths)}", field=_FIELD)
    sessions, bad = _read(paths, reader)
    names = ", ".join(map(str, paths))
    if bad and not skip_bad:
        raise InvalidArgument(_all_bad(names, bad), field=_FIELD)
    if not sessions:
        skipped = f", {len(bad)} bad lines were left out" if bad else ""
        raise InvalidArgument(f"{names}: there is no request{skipped}", field=_FIELD)
    return Trace(tuple(sessions), kind, tuple(bad))


def _read(paths: Sequence[Path], reader: Reader) -> tuple[list[Session], list[BadLine]]:
    """Return all sessions, and all invalid lines in order."""
    bad: list[BadLine] = []
    begins = [0]  # by file: how many lines precede it
    for path in paths:
        lines = 0
        for line, text in lines_of(path):
            lines, index = line, begins[-1] + line - 1
            try:
                reader.add(wire.from_json(text, cast(type[Any], Any)), index)
            except InvalidArgument as error:
                bad.append(BadLine(index + 1, str(error)))
        begins.append(begins[-1] + lines)
    sessions, bad_after_all = reader.finish()
    ordered = sorted([*bad, *bad_after_all], key=lambda one: one.line)
    return sessions, ordered if len(paths) == 1 else [_placed(one, paths, begins) for one in ordered]


def _placed(bad: BadLine, paths: Sequence[Path], begins: Sequence[int]) -> BadLine:
    """Return the line with its file, and its number there."""
    at = bisect_left(begins, bad.line) - 1
    return evolve(bad, line=bad.line - begins[at], file=paths[at].name)


def _reader(
    trace_format: TraceFormat | str, block_size: int | None, shared_prefix_ratio: float, num_prefix_groups: int
) -> tuple[Reader, TraceFormat]:
    try:
        kind = TraceFormat(trace_format)
    except ValueError as error:
        known = ", ".join(TraceFormat)
        raise InvalidArgument(f"must be one of {known}, got {trace_format!r}", field="trace_format") from error
    size = BLOCK_TOKENS if block_size is None else block_size
    if kind is TraceFormat.APPLIED_COMPUTE_AGENTIC:
        return SessionLines(size, shared_prefix_ratio, num_prefix_groups), kind
    for name, value in (("shared_prefix_ratio", shared_prefix_ratio), ("num_prefix_groups", num_prefix_groups)):
        if value:
            raise InvalidArgument(f"a {kind} trace has its own prefixes", field=name)
    if kind is TraceFormat.DYNAMO:
        return DynamoRecords(block_size), kind
    return (AgenticRows if kind is TraceFormat.AGENTIC_MOONCAKE else SessionRows)(size), kind


def _all_bad(path: str, bad: list[BadLine]) -> str:
    lines = [str(one) for one in bad[:_SHOWN_LINES]]
    if len(bad) > _SHOWN_LINES:
        lines.append(f"and {len(bad) - _SHOWN_LINES} more bad lines")
    return f"{path}: " + "\n".join(lines)


def first_requests(trace: Trace, count: int) -> Trace:
    """Return the trace of the first `count` requests, in the order of sessions; the last session is cut.

    Sessions that wait for a request that is left out are left out too.
    """
    kept: list[Session] = []
    for session in trace.sessions:
        turns = session.turns[: max(0, count)]
        count -= len(turns)
        if turns:
            kept.append(evolve(session, turns=turns))
    waiting = {bad.line for bad in never_begin([turn for session in kept for turn in session.turns])}
    return evolve(trace, sessions=tuple(one for one in kept if one.turns[0].line not in waiting))
