"""RecordedOutputs: which rows are read or refused, and which request gets which output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import as_engine
from engines.mocker import MockEngine, MockEngineArgs
from engines.mocker.request import RecordedOutputs, plan_request, remaining_output
from pipeline import Context, InvalidArgument
from pipeline.protocols import PreprocessedRequest, SamplingOptions, StopConditions, TraceLink

FIELD = "response_replay_trace_path"
LINK = TraceLink("0" * 31 + "1", "0" * 15 + "1")


def written(folder: Path, *rows: dict[str, Any] | str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def row(*tokens: int, **fields: Any) -> dict[str, Any]:
    return {"output_length": len(tokens), "output_token_ids": list(tokens)} | fields


def request(
    prompt: list[int] | None = None, max_tokens: int | None = None, name: str | None = None, **fields: Any
) -> PreprocessedRequest:
    annotations = [] if name is None else [f"output_replay_id:{name}"]
    stop = StopConditions(max_tokens=max_tokens)
    return PreprocessedRequest(
        [1, 2] if prompt is None else prompt, stop_conditions=stop, annotations=annotations, **fields
    )


# -- the table


def test_a_row_is_named_by_its_id_else_its_turn_else_its_line(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        row(5, request_id=" a ", session_id="s"),
        row(6, session_id="s"),
        "",
        row(7, session_id=" ", request_id=None),
        row(8, request_id="", session_id="s"),
        row(9, session_id="t"),
    )
    assert RecordedOutputs.load(path).by_name == {"a": [5], "s:1": [6], "line:3": [7], "s:2": [8], "t:0": [9]}


def test_rows_without_tokens_have_no_output_but_count_as_turns(tmp_path: Path) -> None:
    path = written(tmp_path, {"session_id": "s", "output_length": 4, "hash_ids": [1]}, row(6, session_id="s"))
    assert RecordedOutputs.load(path).by_name == {"s:1": [6]}


def test_the_length_may_be_under_its_other_name(tmp_path: Path) -> None:
    path = written(tmp_path, {"output_tokens": 2, "output_token_ids": [3, 4]})
    assert RecordedOutputs.load(path).by_name == {"line:0": [3, 4]}


@pytest.mark.parametrize(
    ("wrong", "about"),
    [
        ("{", "JSON"),
        ("[1]", "object|dict|mapping"),
        ('{"a": 1} {}', "JSON"),
        (row(5, 6, output_length=3), "output_length is 3, there are 2"),
        ({"output_token_ids": [5]}, "output_length is missing"),
        (row(5, output_tokens=1), "1 and 1"),
        (row(), "at least one output token"),
        (row(-1), "token ids"),
        (row(2**32), "token ids"),
        ({"output_length": 1, "output_token_ids": [True]}, "token ids"),
        ({"output_length": 1, "output_token_ids": "5"}, "token ids"),
        (row(5, request_id=7), "request_id"),
        (row(5, session_id=["s"]), "session_id"),
        (row(5, request_id="known"), "known"),
    ],
)
def test_a_wrong_row_is_refused_by_its_number(tmp_path: Path, wrong: dict[str, Any] | str, about: str) -> None:
    path = written(tmp_path, row(5, request_id="known"), "", wrong)
    with pytest.raises(InvalidArgument, match=f"line 3: .*({about})") as refused:
        RecordedOutputs.load(path)
    assert refused.value.field == FIELD


def test_a_turn_may_not_have_the_name_of_another_row(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="line 2"):
        RecordedOutputs.load(written(tmp_path, row(5, request_id="s:0"), row(6, session_id="s")))


@pytest.mark.parametrize("text", [None, "", '{"output_length": 4}\n'])
def test_a_file_without_answers_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "trace.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidArgument) as refused:
        RecordedOutputs.load(path)
    assert refused.value.field == FIELD


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"request_id": "\xff"}\n')
    with pytest.raises(InvalidArgument, match="line 1"):
        RecordedOutputs.load(path)


# -- which request gets which output

KNOWN = RecordedOutputs({"a": [5, 6], "s:0": [7]})


def test_an_annotation_or_the_request_id_selects_the_recorded_output() -> None:
    assert KNOWN.find(request(name="s:0"), "a") == [7]
    assert KNOWN.find(request(), "a") == [5, 6]
    assert KNOWN.find(request(), "b") is None


def test_a_request_for_an_unrecorded_output_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'b'") as refused:
        KNOWN.find(request(name="b"), "a")
    assert refused.value.field == "annotations"


tokens = st.lists(st.integers(0, 3), min_size=1, max_size=6)


@given(tokens, tokens, st.data())
def test_an_answer_that_began_elsewhere_goes_on_where_it_was(
    prompt: list[int], recorded: list[int], data: st.DataObject
) -> None:
    """The continuation is known by the link, or by the limit; a link implies a minimum of emitted tokens."""
    emitted = data.draw(st.integers(0, len(recorded)))
    by_limit = request(prompt + recorded[:emitted], max_tokens=len(recorded) - emitted)
    assert remaining_output(recorded, by_limit) == recorded[emitted:]
    by_link = remaining_output(recorded, request(prompt + recorded[:emitted], migration_link=LINK))
    assert by_link == recorded[len(recorded) - len(by_link) :]
    assert len(by_link) <= len(recorded) - emitted


@given(st.integers(1, 4), st.integers(0, 5), st.integers(0, 6), st.booleans())
def test_a_limit_equal_to_the_rest_gives_the_emitted_length(
    in_prompt: int, emitted: int, more: int, is_linked: bool
) -> None:
    """A link names an earlier worker, not its output: the end of a prompt may look like that of an output."""
    recorded = [7] * (emitted + more)
    link = LINK if is_linked else None
    continued = request([1, *[7] * (in_prompt + emitted)], max_tokens=more, migration_link=link)
    assert remaining_output(recorded, continued) == recorded[emitted:]


def test_a_prompt_that_ends_as_an_answer_begins_is_no_part_of_it() -> None:
    assert remaining_output([5, 6, 7], request([1, 5, 6], max_tokens=3)) == [5, 6, 7]
    assert remaining_output([5, 6, 7], request([1, 5, 6])) == [5, 6, 7]
    assert remaining_output([5, 6, 7], request([1, 5, 6], max_tokens=2)) == [5, 6, 7]


@pytest.mark.parametrize(("max_tokens", "emitted"), [(None, 3), (5, 3), (3, 3), (2, 2), (0, 0)])
def test_a_limit_cuts_what_is_recorded_and_adds_nothing(max_tokens: int | None, emitted: int) -> None:
    plan = plan_request(request(max_tokens=max_tokens), MockEngineArgs(), recorded=[5, 6, 7])
    assert plan.output_tokens == emitted


def test_a_prefill_worker_emits_the_first_recorded_token() -> None:
    plan = plan_request(request(max_tokens=3), MockEngineArgs(worker_type="prefill"), recorded=[5, 6, 7])
    (sequence,) = plan.sequences(64, 0)
    assert sequence.output_tokens(0, 1) == [5]


# -- in an engine


async def test_an_engine_emits_recorded_outputs_and_makes_up_the_others(tmp_path: Path) -> None:
    path = written(tmp_path, row(5, 6, 7, session_id="s"), row(8, request_id="mine"))
    async with as_engine(MockEngine(MockEngineArgs(response_replay_trace_path=str(path)))) as served:

        async def outputs_of(payload: PreprocessedRequest, request_id: str | None = None) -> dict[int, list[int]]:
            chunks: dict[int, list[int]] = {}
            stream: Any = await served.generate(Context(payload, id=request_id))
            for item in await stream.collect():
                chunk = item.ok().data
                chunks.setdefault(chunk.index or 0, []).extend(chunk.token_ids)
            return chunks

        assert await outputs_of(request(name="s:0")) == {0: [5, 6, 7]}
        assert await outputs_of(request(), "mine") == {0: [8]}
        both = request(name="s:0", sampling_options=SamplingOptions(n=2))
        assert await outputs_of(both) == {0: [5, 6, 7], 1: [5, 6, 7]}
        assert all(1000 <= token < 2000 for token in (await outputs_of(request(max_tokens=4)))[0])
        with pytest.raises(InvalidArgument):
            await outputs_of(request(name="t:0"))


async def test_an_engine_with_a_broken_trace_does_not_start(tmp_path: Path) -> None:
    engine = MockEngine(MockEngineArgs(response_replay_trace_path=str(written(tmp_path, row()))))
    with pytest.raises(InvalidArgument, match="at least one output token") as refused:
        await engine.start(0)
    assert refused.value.field == FIELD
