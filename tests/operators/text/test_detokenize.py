"""Detokenize as a stage: what it does with items, choices, stops, errors and endings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from attrs import evolve

from operators import ByteTokenizer, Detokenize, Model
from operators.text.detokenize import Decoding
from pipeline import Annotated, Context, Disconnected, Segment, Unknown, link
from pipeline.protocols import (
    BackendOutput,
    CompletionUsage,
    FinishReason,
    LLMEngineOutput,
    OutputOptions,
    PreprocessedRequest,
    PromptTokensDetails,
    SamplingOptions,
    StopConditions,
    TopLogprob,
)
from pipeline.testing import Fail, ScriptedEngine, Stall, check_operator, watch_streams

EOS = ByteTokenizer.eos_token_id
Item = Annotated[Any]
Below = ScriptedEngine


def chunk(tokens: str | Sequence[int], index: int | None = None, /, **fields: Any) -> Item:
    """An engine's item; of a text the bytes are the tokens."""
    token_ids = list(tokens.encode() if isinstance(tokens, str) else tokens)
    return Annotated(LLMEngineOutput(token_ids, index=index, **fields))


def tokens_request(n: int | None = None, prompt: Sequence[int] = (), **conditions: Any) -> PreprocessedRequest:
    sampling = SamplingOptions(n=n)
    return PreprocessedRequest(
        list(prompt), stop_conditions=StopConditions(**conditions), sampling_options=sampling, eos_token_ids=[EOS]
    )


async def decode(script: list[Any], request: PreprocessedRequest | None = None) -> tuple[list[Item], Below]:
    below = Below(script)
    with watch_streams() as streams:
        graph: Segment[Any, Any] = link(Detokenize(Model.byte_level()), below)
        items = await (await graph.generate(Context(request or tokens_request()))).collect()
    assert (streams.open, below.open) == ([], 0)
    return items, below


def outputs(items: list[Item]) -> list[BackendOutput]:
    found = [item.data for item in items if isinstance(item.data, BackendOutput)]
    assert len(found) == len(items)
    return found


def texts(items: list[Item]) -> list[str | None]:
    return [output.text for output in outputs(items)]


async def test_each_item_keeps_its_shape_and_gains_its_text() -> None:
    usage = CompletionUsage.of(1, 3)
    fields: dict[str, Any] = {
        "cum_log_probs": -1.0,
        "log_probs": [-0.5, -0.5],
        "engine_data": {"k": 1},
        "disaggregated_params": {"p": 2},
        "completion_usage": usage,
        "finish_reason": FinishReason.LENGTH,
        "stop_reason": 7,
    }
    items, _ = await decode([Annotated(LLMEngineOutput([97, 98], index=0, **fields), id="x", comment=["c"])])
    assert items == [Annotated(BackendOutput([97, 98], ["a", "b"], "ab", index=0, **fields), id="x", comment=["c"])]


@pytest.mark.parametrize("n", [1, 2])
def test_a_plain_token_behind_the_end_of_its_choice_or_of_none_is_left_to_the_reader(n: int) -> None:
    taken: list[tuple[Any, ...]] = []

    def take(*parts: Any) -> bool:
        taken.append(parts)
        return True

    decoding = Decoding(ByteTokenizer(), tokens_request(n))
    take_token = decoding.relay(take)
    assert take_token(97, 0)
    assert not take_token(98, n), "there is no such choice"
    assert decoding.convert(chunk("b", 0, finish_reason=FinishReason.LENGTH)) is not None
    assert not take_token(99, 0)
    assert taken == [(97, 0, "a")]


async def test_items_with_an_event_or_without_data_pass_untouched() -> None:
    event = Annotated(LLMEngineOutput([1]), event="note")
    empty: Item = Annotated(comment=["alive"])
    items, _ = await decode([event, empty, chunk("a")])
    assert items[0] is event
    assert items[1] is empty


async def test_text_the_engine_wrote_passes_unchanged_and_its_finish_counts() -> None:
    script = [
        chunk("x", text="one STOP", tokens=["one STOP"]),
        chunk("x", text="", finish_reason=FinishReason.EOS),
        chunk("y", text="after the end"),
    ]
    items, _ = await decode(script, tokens_request(stop=["STOP"]))
    assert [(o.text, o.tokens, o.finish_reason) for o in outputs(items)] == [
        ("one STOP", ["one STOP"], None),
        ("", [None], FinishReason.EOS),
    ]


async def test_text_held_before_the_engine_writes_its_own_comes_first() -> None:
    items, _ = await decode(
        [chunk("aS"), chunk("x", text="!", finish_reason=FinishReason.EOS)], tokens_request(stop=["STOP"])
    )
    assert texts(items) == ["a", "S!"]


async def test_an_item_that_completes_no_text_still_brings_its_tokens() -> None:
    items, _ = await decode([chunk(b"\xe6"), chunk(b"\x97\xa5")])
    assert [(o.token_ids, o.tokens, o.text) for o in outputs(items)] == [
        ([0xE6], [None], None),
        ([0x97, 0xA5], [None, "日"], "日"),
    ]


async def test_the_answer_finishes_a_character_the_prompt_began() -> None:
    items, _ = await decode([chunk(b"\xa5")], tokens_request(prompt=[97, 0xE6, 0x97]))
    assert texts(items) == ["日"]


async def test_special_tokens_are_shown_on_request() -> None:
    request = tokens_request()
    request.output_options = OutputOptions(skip_special_tokens=False)
    items, _ = await decode([chunk([EOS])], request)
    assert texts(items) == ["<eos>"]


async def test_a_local_stop_ends_everything_and_stops_the_engine() -> None:
    below = Below([chunk("a"), chunk("b#!c", log_probs=[-1.0] * 4), chunk("never")])
    context = Context(tokens_request(stop=["#!"]))
    with watch_streams() as streams:
        async with await link(Detokenize(Model.byte_level()), below).generate(context) as stream:
            items = [await stream.__anext__(), await stream.__anext__()]
            assert below.requests[0].is_stopped
            assert [item async for item in stream] == []
            assert below.open == 0
    assert (below.delivered, streams.open) == (2, [])
    assert not context.is_stopped
    last = outputs(items)[-1]
    assert (last.text, last.finish_reason, last.stop_reason) == ("b", FinishReason.STOP, "#!")
    assert (last.token_ids, last.tokens, last.log_probs) == (list(b"b#!"), ["b", "#", None], [-1.0] * 3)


async def test_our_stop_beats_the_finish_reason_of_the_same_item() -> None:
    usage = CompletionUsage.of(0, 3)
    script = [chunk("a.b", finish_reason=FinishReason.LENGTH, stop_reason=5, completion_usage=usage)]
    items, _ = await decode(script, tokens_request(stop_token_ids=[ord(".")]))
    (output,) = outputs(items)
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, ord("."))
    assert output.completion_usage == CompletionUsage.of(0, 2)  # of the tokens that are delivered


async def test_what_counts_tokens_is_cut_with_them() -> None:
    candidates = [[TopLogprob(1, token, -0.5)] for token in b"abc"]
    usage = evolve(CompletionUsage.of(4, 9), prompt_tokens_details=PromptTokensDetails(3))
    item = chunk(
        "abc", log_probs=[-0.5, -0.25, -2.0], top_logprobs=candidates, cum_log_probs=-4.0, completion_usage=usage
    )
    items, _ = await decode([item], tokens_request(stop=["b"]))
    (output,) = outputs(items)
    assert (output.text, output.token_ids, output.log_probs) == ("a", list(b"ab"), [-0.5, -0.25])
    assert (len(output.top_logprobs or ()), output.cum_log_probs) == (2, -2.0)
    assert output.completion_usage == evolve(CompletionUsage.of(4, 8), prompt_tokens_details=PromptTokensDetails(3))


async def test_a_sum_that_cannot_be_cut_is_left_out() -> None:
    items, _ = await decode([chunk("abc", cum_log_probs=-4.0)], tokens_request(stop=["b"]))
    assert [output.cum_log_probs for output in outputs(items)] == [None]


async def test_the_engines_finish_reason_survives_and_brings_what_was_held() -> None:
    script = [chunk("aST"), chunk("", finish_reason=FinishReason.LENGTH)]
    items, below = await decode(script, tokens_request(stop=["STOP"]))
    assert [(o.text, o.finish_reason) for o in outputs(items)] == [("a", None), ("ST", FinishReason.LENGTH)]
    assert not below.requests[0].is_stopped


async def test_a_match_that_waited_counts_at_the_engines_end() -> None:
    items, _ = await decode([chunk("abc", finish_reason=FinishReason.LENGTH)], tokens_request(stop=["abcd", "bc"]))
    (output,) = outputs(items)
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", FinishReason.STOP, "bc")


async def test_choices_are_decoded_apart_and_the_engine_stops_after_the_last() -> None:
    script = [
        chunk(b"\xe6", 0),
        chunk("x#", 1),
        chunk(b"\x97\xa5", 0),
        chunk("ignored", 1),
        chunk("y#", 0),
        chunk("never", 0),
    ]
    items, below = await decode(script, tokens_request(n=2, stop=["#"]))
    assert [(o.index, o.text, o.finish_reason) for o in outputs(items)] == [
        (0, None, None),
        (1, "x", FinishReason.STOP),
        (0, "日", None),
        (0, "y", FinishReason.STOP),
    ]
    assert below.requests[0].is_stopped
    assert below.delivered == 5


async def test_the_engine_is_stopped_when_it_finished_the_others_itself() -> None:
    script = [chunk("#", 0), chunk("b", 1, finish_reason=FinishReason.EOS), chunk("after the end", 0)]
    items, below = await decode(script, tokens_request(n=2, stop=["#"]))
    assert len(items) == 2
    assert below.requests[0].is_stopped


async def test_choices_the_engine_finished_do_not_stop_it() -> None:
    script = [chunk("a", 0, finish_reason=FinishReason.EOS), chunk("b", 1, finish_reason=FinishReason.EOS)]
    items, below = await decode([*script, Annotated(event="note")], tokens_request(n=2))
    assert len(items) == 3
    assert not below.requests[0].is_stopped


@pytest.mark.parametrize("index", [2, 7, -1])
async def test_an_answer_for_an_unknown_choice_ends_the_request_with_an_error(index: int) -> None:
    items, below = await decode([chunk("a", 0), chunk("b", index), chunk("c", 0)], tokens_request(n=2))
    last = outputs(items)[-1]
    assert last.index == index
    assert last.finish_reason == FinishReason.error(f"the engine answered for choice {index}, asked for were 2")
    assert below.requests[0].is_stopped


async def test_a_token_that_is_none_finishes_its_choice_with_a_decode_error() -> None:
    items, below = await decode([chunk([97, 9999, 98]), chunk("never")])
    (output,) = outputs(items)
    assert str(output.finish_reason).startswith("error: decode error:")
    assert (output.text, output.token_ids) == ("a", [97, 9999])
    assert below.requests[0].is_stopped


@pytest.mark.parametrize("text", [None, "a"])
async def test_top_log_probabilities_are_given_their_text_and_bytes(text: str | None) -> None:
    bare = [TopLogprob(1, 97, -0.1), TopLogprob(2, 0xE6, -2.0), TopLogprob(3, 9999, -3.0)]
    known = TopLogprob(4, 98, -4.0, token="B", bytes=[66])
    items, _ = await decode([chunk("a", text=text, top_logprobs=[[*bare, known]])])
    assert outputs(items)[0].top_logprobs == [
        [
            TopLogprob(1, 97, -0.1, "a", [97]),
            TopLogprob(2, 0xE6, -2.0, "\ufffd", [0xE6]),
            TopLogprob(3, 9999, -3.0),
            known,
        ]
    ]
    assert bare[0].token is None, "the engine's own record must not change"


async def test_held_text_is_shown_when_the_stream_ends_without_a_finish() -> None:
    items, _ = await decode([chunk("aS", 0), chunk(b"b\xe6", 1)], tokens_request(n=2, stop=["STOP"]))
    assert outputs(items)[2:] == [BackendOutput([], [], "S", index=0), BackendOutput([], [], "\ufffd", index=1)]


async def test_a_match_found_at_the_end_names_its_stop_string() -> None:
    items, _ = await decode([chunk("xabc")], tokens_request(stop=["abcd", "bc"]))
    assert outputs(items)[1:] == [BackendOutput([], [], "a", finish_reason=FinishReason.STOP, stop_reason="bc")]


async def test_held_text_is_shown_after_a_stop() -> None:
    below = Below([chunk("aS"), Stall()])
    context = Context(tokens_request(stop=["STOP"]))
    async with await link(Detokenize(Model.byte_level()), below).generate(context) as stream:
        first = await stream.__anext__()
        context.stop()
        assert texts([first, *[item async for item in stream]]) == ["a", "S"]


async def test_nothing_is_shown_after_a_kill() -> None:
    below = Below([chunk("aS"), Stall()])
    context = Context(tokens_request(stop=["STOP"]))
    async with await link(Detokenize(Model.byte_level()), below).generate(context) as stream:
        await stream.__anext__()
        context.kill()
        assert [item async for item in stream] == []


@pytest.mark.parametrize("end", [Fail(Disconnected("gone")), Annotated.from_error("gone")])
async def test_a_kill_among_the_last_items_ends_them(end: Any) -> None:
    below = Below([chunk("S", 0), chunk("S", 1), end])
    context = Context(tokens_request(n=2, stop=["STOP"]))
    async with await link(Detokenize(Model.byte_level()), below).generate(context) as stream:
        assert texts([await stream.__anext__() for _ in range(3)]) == [None, None, "S"]
        context.kill()
        assert [item async for item in stream] == []


async def test_held_text_comes_before_an_error_that_is_raised() -> None:
    error = Disconnected("gone")
    below = Below([chunk("aS"), chunk(b"\xe6"), Fail(error)])
    async with await link(Detokenize(Model.byte_level()), below).generate(
        Context(tokens_request(stop=["STOP"]))
    ) as stream:
        seen = [await stream.__anext__() for _ in range(3)]
        with pytest.raises(Disconnected) as caught:
            await stream.__anext__()
    assert caught.value is error
    # The unfinished character is left to the worker that goes on with these tokens as its prompt.
    assert texts(seen) == ["a", None, "S"]


async def test_held_text_comes_before_an_error_item() -> None:
    failure: Item = Annotated.from_error(Disconnected("gone"))
    items, _ = await decode([chunk("aS"), failure], tokens_request(stop=["STOP"]))
    assert texts(items[:2]) == ["a", "S"]
    assert items[2] is failure


async def test_what_the_next_stage_refuses_goes_to_the_caller() -> None:
    graph: Segment[Any, Any] = link(Detokenize(Model.byte_level()), Below([], fails=Disconnected("no")))
    with pytest.raises(Disconnected):
        await graph.generate(Context(tokens_request()))


async def test_the_operator_contract_holds() -> None:
    items = [chunk(chr(97 + i % 26)) for i in range(60)]
    for request in (tokens_request(), tokens_request(stop=["never", "ab!"]), tokens_request(stop_token_ids=[ord("z")])):
        await check_operator(lambda: Detokenize(Model.byte_level()), request=request, items=items)


class Panic(BaseException):
    """As a Rust library raises it."""


@pytest.mark.parametrize("at_once", [True, False])
async def test_whatever_a_decoder_raises_is_an_error_of_the_tree(
    at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:

    def panic(*_: Any, **__: Any) -> Any:
        raise Panic("index out of bounds")

    model, below = Model.byte_level(), Below([chunk("a"), chunk("b")])
    if at_once:
        monkeypatch.setattr(model.tokenizer, "decoder", panic)
    else:
        monkeypatch.setattr("operators.text.choice_decoder.ChoiceDecoder.feed", panic)
    graph: Segment[Any, Any] = link(Detokenize(model), below)
    with watch_streams() as streams, pytest.raises(Unknown, match="Panic: index out of bounds"):
        await (await graph.generate(Context(tokens_request()))).collect()
    assert (streams.open, below.open) == ([], 0)
