"""The text stages together, on an engine that echoes: a message comes back as it was written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from engines import EchoEngine, as_engine
from operators import ChatTemplate, Detokenize, HuggingFaceTokenizer, Model, Preprocess
from pipeline import Context
from pipeline.protocols import BackendOutput, FinishReason
from pipeline.protocols.openai import ChatCompletionRequest
from pipeline.testing import run_in_virtual_time, watch_streams
from pipeline.wire import from_plain


def chat(text: str, **fields: Any) -> ChatCompletionRequest:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": text}]
    return from_plain({"model": "m", "messages": messages, **fields}, ChatCompletionRequest)


async def answer(model: Model, request: ChatCompletionRequest) -> list[BackendOutput]:
    with watch_streams() as streams:
        async with as_engine(EchoEngine()) as engine:
            graph = Preprocess(model) >> Detokenize(model) >> engine
            items = await (await graph.generate(Context(request))).collect()
    assert streams.open == []
    return [item.data for item in items if item.data is not None]


def spoken(outputs: list[BackendOutput], index: int | None = None) -> str:
    return "".join(output.text or "" for output in outputs if output.index == index)


@given(text=st.text(st.sampled_from("ab the日本é🙂👩‍👩‍👧\n한"), min_size=1, max_size=20), n=st.integers(1, 3))
def test_a_message_comes_back_as_it_was_written(byte_level: HuggingFaceTokenizer, text: str, n: int) -> None:
    bytes_only = Model.byte_level()
    for model in (bytes_only, evolve(bytes_only, tokenizer=byte_level, eos_token_ids=())):
        outputs = run_in_virtual_time(answer, model, chat(text, n=n), backend="asyncio")
        for index in [None] if n == 1 else range(n):
            assert spoken(outputs, index) == text


async def test_a_model_folder_echoes_what_its_template_makes_of_a_chat(folder: Callable[..., Path]) -> None:
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    model = Model.from_folder(folder(chat_template__jinja=template))
    assert spoken(await answer(model, chat("héllo"))) == "[system] be brief\n[user] héllo\n"


async def test_a_stop_string_cuts_the_echo() -> None:
    outputs = await answer(Model.byte_level(), chat("one, two, three", stop=[", t"]))
    assert spoken(outputs) == "one"
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, ", t")


async def test_a_limit_cuts_the_echo_inside_a_character() -> None:
    outputs = await answer(Model.byte_level(), chat("a日", max_tokens=2))
    assert spoken(outputs) == "a\ufffd"
    assert outputs[-1].finish_reason == FinishReason.LENGTH


async def test_the_models_end_token_ends_the_echo_unless_ignored(byte_level: HuggingFaceTokenizer) -> None:
    end = byte_level.token_id("<|end|>")
    assert end is not None
    template = ChatTemplate("a{{ eos_token }}b", tokens={"eos_token": "<|end|>"})
    model = Model("m", byte_level, template, eos_token_ids=(end,))
    assert spoken(await answer(model, chat("x"))) == "a"
    assert spoken(await answer(model, chat("x", ignore_eos=True))) == "ab"


def test_the_graph_prints_as_it_is_written() -> None:
    model = Model.byte_level()
    graph = Preprocess(model) >> Detokenize(model) >> as_engine(EchoEngine(delay_s=0.5))
    assert str(graph) == "Preprocess(echo) >> Detokenize(echo) >> as_engine(EchoEngine)"
