"""Request traces of Dynamo's front end: from their records to sessions, and through a graph."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Context, InvalidArgument
from pipeline.protocols import PreprocessedRequest
from serving.deployment import GraphConfig
from serving.replay import Trace, Turn, driver, parse_faults, read_trace, run_config
from serving.replay.traces import DynamoRecords, TraceFormat

Read = Callable[..., Trace]
SCHEMA = "dynamo.request.trace.v1"


def request(name: str, start: int, end: int, *hashes: int, output: int = 5, **fields: Any) -> dict[str, Any]:
    """Return a record of a request of whole blocks of two tokens, unless `replay` overrides them.

    `session` and `parent` are its agent's. `fields` are those of the request; None leaves one out.
    """
    session, parent, more = fields.pop("session", None), fields.pop("parent", None), fields.pop("replay", {})
    replay = {"trace_block_size": 2, "input_length": 2 * len(hashes), "input_sequence_hashes": list(hashes)} | more
    fields = {
        "request_id": name,
        "request_received_ms": start,
        "total_time_ms": end - start,
        "output_tokens": output,
        "replay": {key: value for key, value in replay.items() if value is not None},
        **fields,
    }
    record = {
        "schema": SCHEMA,
        "event_type": "request_end",
        "event_time_unix_ms": end,
        "request": {key: value for key, value in fields.items() if value is not None},
    }
    context = {"session_id": session} | ({} if parent is None else {"parent_session_id": parent})
    return record if session is None else record | {"agent_context": context}


def tool(session: str, source: str, consumer: str | None, child: str | None, mode: str = "blocking") -> dict[str, Any]:
    claude = {"source_request_id": source, "execution_mode": mode}
    claude |= {} if consumer is None else {"consumer_request_id": consumer}
    claude |= {} if child is None else {"child_session_id": child}
    tool = {"tool_call_id": "call", "tool_class": "Agent", "claude": claude}
    record = {"schema": SCHEMA, "event_type": "tool_end", "event_time_unix_ms": 9}
    return record | {"agent_context": {"session_id": session}, "tool": tool}


@pytest.fixture
def read(trace_of: Read) -> Read:
    return lambda *rows, **settings: trace_of(*rows, trace_format="dynamo", **settings)


def turns(trace: Trace) -> dict[str, Turn]:
    return {turn.name: turn for session in trace.sessions for turn in session.turns}


def waits(trace: Trace) -> dict[str, tuple[tuple[str, ...], float]]:
    return {name: (turn.wait_for, turn.delay_ms) for name, turn in turns(trace).items() if turn.wait_for}


# -- requests without agents


def test_requests_arrive_as_they_did_and_same_hashes_are_same_blocks(read: Read) -> None:
    trace = read(
        request("c", 1_500, 1_600, 11, 33),
        request("b", 1_000, 1_700, 22),
        request("a", 1_000, 1_100, 11, 22),
    )
    assert trace.format is TraceFormat.DYNAMO
    assert [one.turns[0].name for one in trace.sessions] == ["a", "b", "c"]
    assert [one.arrival_ms for one in trace.sessions] == [0.0, 0.0, 500.0]
    assert [one.is_named for one in trace.sessions] == [False] * 3
    known = turns(trace)
    assert [known[name].prompt.token_ids() for name in "abc"] == [[0, 0, 1, 1], [1, 1], [0, 0, 2, 2]]
    assert (known["a"].line, known["a"].output_tokens, known["a"].recorded) == (3, 5, None)


def test_the_last_block_may_be_begun_only(read: Read) -> None:
    trace = read(request("a", 0, 1, 5, 6, replay={"input_length": 3}))
    assert turns(trace)["a"].prompt.token_ids() == [0, 0, 1]


def test_hashes_have_64_bits(read: Read) -> None:
    assert turns(read(request("a", 0, 1, 2**64 - 1, 0)))["a"].prompt.token_ids() == [0, 0, 1, 1]


def test_records_may_be_wrapped_and_others_are_passed_over(read: Read) -> None:
    payload = {"schema": SCHEMA, "event_type": "request_payload", "event_time_unix_ms": 1, "payload": {}}
    started = {"schema": SCHEMA, "event_type": "tool_start", "event_time_unix_ms": 1}
    plain_tool = {"schema": SCHEMA, "event_type": "tool_error", "event_time_unix_ms": 1, "tool": {"tool_call_id": "1"}}
    wrapped = {"timestamp": 1, "event": request("a", 5, 6, 7)}
    trace = read(payload, {"event": payload}, started, plain_tool, {"event": "text"}, wrapped)
    assert list(turns(trace)) == ["a"]


@pytest.mark.parametrize("total", [None, 0.4, 499.5])
def test_a_request_ends_at_the_time_of_its_record(read: Read, total: float | None) -> None:
    """Its total time counts, rounded; without one the time of the record."""
    first = request("a", 1_000, 1_250, 1, session="s", total_time_ms=total)
    trace = read(first, request("b", 2_000, 2_100, 1, session="s"))
    assert waits(trace) == {"b": (("a",), {None: 750.0, 0.4: 1_000.0, 499.5: 500.0}[total])}


def test_a_known_answer_is_recorded_and_continues_in_the_next_prompt(read: Read) -> None:
    parent = request("a", 0, 1, 11, output=2, replay={"completion_sequence_hashes": [11, 22]})
    child = request("b", 5, 6, 11, 22, output=1, replay={"completion_sequence_hashes": [11, 22, 33]})
    known = turns(read(parent, child))
    recorded = known["a"].recorded
    assert recorded is not None
    assert [*known["a"].prompt.token_ids(), *recorded] == known["b"].prompt.token_ids()


def test_an_answer_completes_a_block_that_the_prompt_only_began(read: Read) -> None:
    known_answer = {"input_length": 3, "completion_sequence_hashes": [11, 22]}
    parent = request("a", 0, 1, 11, 12, output=1, replay=known_answer)
    known = turns(read(parent, request("b", 5, 6, 11, 22)))
    assert known["a"].recorded is not None
    assert [*known["a"].prompt.token_ids(), *known["a"].recorded] == known["b"].prompt.token_ids()


def test_an_empty_answer_is_not_recorded(read: Read) -> None:
    known = turns(read(request("a", 0, 1, 1, output=0, replay={"completion_sequence_hashes": [1]})))
    assert (known["a"].recorded, known["a"].output_tokens) == (None, 0)


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=5))
def test_each_prompt_of_a_conversation_begins_with_all_turns_before(size: int, lengths: list[tuple[int, int]]) -> None:
    """For any lengths; a hash is of all tokens up to the end of its block, as the front end writes it."""
    records, length, text = DynamoRecords(), 0, 0
    hashes: list[int] = []

    def next_hashes(tokens: int) -> list[int]:
        """Return the hashes after that many more tokens; a block that was partial gets another one."""
        nonlocal text, length
        del hashes[length // size :]
        length += tokens
        text += 1
        hashes.extend(1000 * text + at for at in range(length // size + bool(length % size) - len(hashes)))
        return list(hashes)

    for at, (question, answer) in enumerate(lengths):
        prompt, prompt_tokens = next_hashes(question), length
        completion = next_hashes(answer)
        replay = {"trace_block_size": size, "input_length": prompt_tokens, "completion_sequence_hashes": completion}
        records.add(request(f"{at}", at, at, *prompt, output=answer, replay=replay), at)
    sessions, bad = records.finish()
    assert bad == []
    made = [one.turns[0] for one in sessions]
    for before, one in pairwise(made):
        whole = [*before.prompt.token_ids(), *(before.recorded or [])]
        kept = len(whole) // size * size
        assert one.prompt.token_ids()[:kept] == whole[:kept]


# -- what is wrong


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ([], r"it is \[\], not an object"),
        ({"timestamp": 1}, "schema is None, not 'dynamo.request.trace.v1'"),
        (request("a", 0, 1, 1) | {"schema": "dynamo.request.trace.v2"}, "schema is 'dynamo.request.trace.v2'"),
        (request("a", 0, 1, 1) | {"event_type": "request_start"}, "event_type is 'request_start', not one of request"),
        (request("a", 0, 1, 1) | {"request": None}, "request is missing"),
        (request("a", 0, 1, 1) | {"request": 5}, "request is 5, not an object"),
        (request("a", 0, 1, 1) | {"event_time_unix_ms": None}, "event_time_unix_ms is missing"),
        (request("a", 0, 1, 1) | {"agent_context": {}}, "session_id is missing"),
        (request("", 0, 1, 1), "request_id is missing"),
        (request("a", 0, 1, 1, request_received_ms=None), "request_received_ms is missing"),
        (request("a", 0, 1, 1, output_tokens=None), "output_tokens is missing"),
        (request("a", 0, 1, 1, output_tokens=None, request_received_ms=-1), "request_received_ms is -1, .*; output_to"),
        (request("a", 0, -1, 1), "event_time_unix_ms is -1"),
        (request("a", 0, 1, 1) | {"request": {"request_id": "a"}}, "replay is missing"),
        (request("a", 0, 1, 1, replay={"trace_block_size": 0}), "trace_block_size is 0"),
        (request("a", 0, 1, replay={"input_length": 0}), "input_length is 0"),
        (request("a", 0, 1, 1, replay={"input_sequence_hashes": None}), "input_sequence_hashes is missing"),
        (request("a", 0, 1, 2**64), "input_sequence_hashes is not a list of whole numbers of 64 bits"),
        (request("a", 0, 1, 1, 2, replay={"input_length": 2}), "input_length 2 in blocks of 2 needs 1 .*, there are 2"),
        (
            request("a", 0, 1, 1, output=1, replay={"completion_sequence_hashes": [1]}),
            "with the answer it needs 2 .* 1",
        ),
        (request("a", 0, 1, 1, output=1, replay={"completion_sequence_hashes": [3, 4]}), "do not begin with the whole"),
        (tool("s", "r", None, None, "sometimes"), "execution_mode is 'sometimes', not one of blocking, background"),
        (tool("s", "", None, None), "source_request_id is missing"),
        (request("first", 0, 1, 1), "there is a request 'first' already"),
        (
            request("a", 0, 1, 1, replay={"trace_block_size": 1}),
            "trace_block_size is 1, that of all is to be 2|needs 2",
        ),
        (request("a", 0, 1, 1, session="s"), "it has an agent_context, other than the requests before it"),
    ],
)
def test_an_invalid_record_is_reported_with_its_problem(read: Read, record: Any, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=f"trace.jsonl: line 2: .*({problem})"):
        read(request("first", 0, 1, 1), json.dumps(record))
    trace = read(request("first", 0, 1, 1), json.dumps(record), skip_bad=True)
    assert (list(turns(trace)), [bad.line for bad in trace.skipped]) == (["first"], [2])


def test_a_trace_contains_its_block_size_and_another_one_is_refused(read: Read) -> None:
    assert read(request("a", 0, 1, 1, 2), trace_block_size=2).input_tokens == 4
    with pytest.raises(InvalidArgument, match="trace_block_size is 2, that of all is to be 4"):
        read(request("a", 0, 1, 1, 2), trace_block_size=4)
    with pytest.raises(InvalidArgument, match="trace_block_size is 4, that of all is to be 2"):
        read(request("a", 0, 1, 1), request("b", 0, 1, 1, 2, replay={"trace_block_size": 4, "input_length": 8}))


def test_requests_with_and_without_agents_are_not_mixed(read: Read) -> None:
    with pytest.raises(InvalidArgument, match="line 2: it has no agent_context"):
        read(request("a", 0, 1, 1, session="s"), request("b", 0, 1, 1))


@pytest.mark.parametrize("rows", [[], [{"schema": SCHEMA, "event_type": "tool_start"}]])
def test_a_trace_without_requests_is_an_error(read: Read, rows: list[Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"there is no request$"):
        read(*rows)


# -- files


def written(path: Path, *rows: Any) -> Path:
    data = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_a_trace_may_be_in_several_files_and_compressed(tmp_path: Path) -> None:
    shards = [
        written(tmp_path / "t.000000.jsonl.gz", request("b", 200, 300, 1, 2)),
        written(tmp_path / "t.000001.jsonl.gz"),
        written(tmp_path / "t.000002.jsonl", request("a", 100, 150, 1)),
    ]
    trace = read_trace(shards, "dynamo")
    assert [(name, turn.line) for name, turn in turns(trace).items()] == [("a", 2), ("b", 1)]
    assert [one.arrival_ms for one in trace.sessions] == [0.0, 100.0]


def test_a_bad_line_is_named_by_its_file_and_its_number_there(tmp_path: Path) -> None:
    good = [request(f"{at}", at, at, 1) for at in range(3)]
    shards = [written(tmp_path / f"{at}.jsonl", one, {}, []) for at, one in enumerate(good)]
    with pytest.raises(InvalidArgument) as caught:
        read_trace(shards, "dynamo")
    lines = [line.split(": ", 1)[0] for line in str(caught.value).split(": ", 1)[1].splitlines()]
    assert lines == [f"{at}.jsonl line {line}" for at in range(3) for line in (2, 3)]
    skipped = read_trace(shards, "dynamo", skip_bad=True).skipped
    assert [(bad.file, bad.line) for bad in skipped] == [(f"{at}.jsonl", line) for at in range(3) for line in (2, 3)]


def test_a_truncated_or_invalid_gzip_file_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(json.dumps(request("a", 0, 1, 1)).encode())
    for data in (whole[:-9], b"plain", whole[:20] + b"\xff" * 20):
        path = tmp_path / "t.jsonl.gz"
        path.write_bytes(data)
        with pytest.raises(InvalidArgument, match=r"cannot read .*t\.jsonl\.gz"):
            read_trace(path, "dynamo")


@pytest.mark.parametrize(("count", "kind"), [(2, "mooncake"), (2, "agentic_mooncake"), (0, "mooncake"), (0, "dynamo")])
def test_only_a_dynamo_trace_has_several_files(tmp_path: Path, count: int, kind: str) -> None:
    files = [written(tmp_path / f"{at}.jsonl", {"hash_ids": [1], "output_length": 1}) for at in range(count)]
    with pytest.raises(InvalidArgument, match=f"a {kind} trace is one file, not {count}"):
        read_trace(files, kind)


# -- in a graph


@pytest.mark.parametrize("prefill_workers", [0, 1])
async def test_recorded_answers_are_complete_although_workers_die(
    read: Read, prefill_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tokens repeat, as do the last ones of the prompt, so no text shows where an answer was broken off."""
    answers: dict[str, list[int]] = {}
    answered = driver.LoadDriver._answered

    async def listening(self: Any, request: Context[PreprocessedRequest], *rest: Any) -> Any:
        answers[request.id], status = await answered(self, request, *rest)
        return answers[request.id], status

    monkeypatch.setattr(driver.LoadDriver, "_answered", listening)
    size = {"trace_block_size": 64}
    first = size | {"input_length": 100, "completion_sequence_hashes": [1, 3, 4, 5]}
    second = size | {"input_length": 220, "completion_sequence_hashes": [1, 3, 4, 6, 7, 8]}
    rows = []
    for at in range(6):
        rows.append(request(f"a{at}", 100 * at, 9_000, 1, 2, output=150, session=f"{at}", replay=first))
        rows.append(request(f"b{at}", 9_500, 9_900, 1, 3, 4, 9, output=150, session=f"{at}", replay=second))
    trace = read(*rows)
    script = parse_faults(["worker 0 dies at 0.9, returns at 1.2", "worker 1 dies at 1.5, returns at 1.8"])
    config = GraphConfig(engine="mocker", workers=2, prefill_workers=prefill_workers, router="kv", seed=7)
    report = await run_config(config, trace, faults=script)
    assert (report.completed_requests, report.migrations > 2) == (12, True)
    known = {name: list(turn.recorded or []) for name, turn in turns(trace).items()}
    assert answers == known
    assert report.prefix_cache_reused_ratio > 0.3
