"""Preprocess and long prompts: the same request as at once, made beside the loop, and given up with its caller."""

from __future__ import annotations

import json
from threading import Event, get_ident
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from operators import ByteTokenizer, ChatTemplate, Model, Preprocess
from operators.text import WHOLE_CHAT
from operators.text.prompt_threads import json_of_ids, json_of_text
from operators.text.request_size import prompt_characters
from pipeline import Cancelled, Context, InvalidArgument, PenstockError, Segment, link
from pipeline.errors import CodecError
from pipeline.protocols import PreprocessedRequest
from pipeline.protocols.limits import PromptWork, RequestLimits
from pipeline.protocols.openai import ChatCompletionRequest, CompletionRequest
from pipeline.testing import ScriptedEngine
from pipeline.wire import from_plain

IN_A_THREAD, AT_ONCE = PromptWork(inline_prompt_characters=0), PromptWork(inline_prompt_characters=10**9)
LIMITS = RequestLimits()
PATIENCE_S = 20.0
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "a": ["b"] * 9}}}
ALL = {"annotations": ["request_id", "formatted_prompt", "token_ids"]}


def chat(**fields: Any) -> ChatCompletionRequest:
    plain = {"model": "m", "messages": [{"role": "user", "content": "hi there"}], **fields}
    return from_plain(plain, ChatCompletionRequest)


def text(prompt: Any, **fields: Any) -> CompletionRequest:
    return from_plain({"model": "m", "prompt": prompt, **fields}, CompletionRequest)


async def outcome(request: Any, work: PromptWork, model: Model, limits: RequestLimits = LIMITS) -> tuple[Any, ...]:
    """What the next stage gets, and the annotations; or the error."""
    below = ScriptedEngine([])
    graph: Segment[Any, Any] = link(Preprocess(model, work=work, limits=limits), below)
    try:
        async with await graph.generate(Context(request, id="r")) as stream:
            events = [(item.event, item.comment) async for item in stream]
    except PenstockError as error:
        return type(error), str(error), getattr(error, "field", ""), error.exceeded
    payload: PreprocessedRequest = below.requests[0].payload
    return payload, events


class Recording(ByteTokenizer):
    """Note the threads it works in; wait in each if set to, and fails with an error if it has one."""

    def __init__(self, waits: bool = False, error: BaseException | None = None) -> None:
        super().__init__()
        self.threads: list[int] = []
        self.begun, self.may_go_on = Event(), Event()
        self.waits, self.error = waits, error

    def encode(self, text: str) -> list[int]:
        self.threads.append(get_ident())
        self.begun.set()
        if self.waits:
            assert self.may_go_on.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        return super().encode(text)


def model(tokenizer: ByteTokenizer | None = None, **fields: Any) -> Model:
    whole = Model.byte_level("m", chat_template=WHOLE_CHAT)
    return evolve(whole, tokenizer=tokenizer or whole.tokenizer, **fields)


@pytest.mark.parametrize(
    "request_",
    [
        chat(),
        chat(tools=[TOOL], nvext=ALL),
        chat(messages=[{"role": "user", "content": "héllo\0"}, {"role": "assistant", "content": "x"}], nvext=ALL),
        chat(nvext={"token_data": [1, 2, 3], **ALL}),
        text("some text", nvext=ALL),
        text([1, 2, 300]),
        text(["one"]),
        text(["one", "two"]),
        chat(temperature=9),
        chat(nvext={"token_data": [1, 999]}),
        chat(continue_final_message=True, add_generation_prompt=True),
        text("half a \ud800"),
        text("x" * 100),
    ],
)
async def test_a_thread_makes_the_same_request_and_the_same_errors(request_: Any) -> None:
    small = model(context_length=60)
    assert await outcome(request_, IN_A_THREAD, small) == await outcome(request_, AT_ONCE, small)


async def test_only_a_prompt_beyond_the_threshold_leaves_the_loop() -> None:
    for characters, is_here in ((8_192, True), (8_193, False)):
        tokenizer = Recording()
        await outcome(text("x" * characters), PromptWork(), model(tokenizer))
        assert (set(tokenizer.threads) == {get_ident()}) is is_here


@pytest.mark.parametrize("work", [IN_A_THREAD, AT_ONCE], ids=["in a thread", "at once"])
async def test_a_text_may_become_so_many_tokens(work: PromptWork) -> None:
    limits = RequestLimits(max_prompt_tokens=70_000)
    assert (await outcome(text("x" * 70_000), work, model(), limits))[0].token_ids == [120] * 70_000
    kind, _, field, exceeded = await outcome(text("x" * 200_000), work, model(), limits)
    assert (kind, field, exceeded.name, exceeded.threshold) == (InvalidArgument, "prompt", "max_prompt_tokens", 70_000)
    assert exceeded.value == 200_000 if work is AT_ONCE else exceeded.value < 140_000  # the rest is not tokenized
    assert not isinstance(
        (await outcome(text("x" * 200_000), work, model(), RequestLimits(max_prompt_tokens=0)))[0], type
    )


@pytest.mark.parametrize("ending", ["stop", "kill"])
async def test_a_request_that_ends_while_its_text_is_in_a_thread_ends_at_once(ending: str) -> None:
    tokenizer, below, errors = Recording(waits=True), ScriptedEngine([]), []
    graph: Segment[Any, Any] = link(Preprocess(model(tokenizer), work=IN_A_THREAD), below)
    context = Context(text("x" * 100_000))

    async def send() -> None:
        with pytest.raises(Cancelled) as caught:
            await graph.generate(context)
        errors.append(caught.value)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send)
        assert await anyio.to_thread.run_sync(tokenizer.begun.wait, PATIENCE_S)
        getattr(context, ending)()
        for _ in range(5):
            await checkpoint()
        assert len(errors) == 1
        tokenizer.may_go_on.set()
    assert not below.requests
    assert len(tokenizer.threads) == 1, "the other pieces are never encoded"


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1), KeyboardInterrupt()])
async def test_what_a_tokenizer_raises_in_a_thread_fails_its_own_request_only(error: BaseException) -> None:
    kind, *_ = await outcome(text("x"), IN_A_THREAD, model(Recording(error=error)))
    assert issubclass(kind, PenstockError)
    assert kind is (await outcome(text("x"), AT_ONCE, model(Recording(error=error))))[0]


async def test_a_text_is_encoded_no_further_than_the_model_can_take() -> None:
    tokenizer = Recording()
    kind, message, field, _ = await outcome(text("x" * 1_000_000), IN_A_THREAD, model(tokenizer, context_length=40_000))
    assert (kind, field) == (InvalidArgument, "prompt")
    assert "maximum context length is 40000 tokens. However, your messages resulted in at least 65536 tokens" in message
    assert len(tokenizer.threads) == 2
    lenient = model(Recording(), context_length=40_000, reject_prompt_overflow=False, reject_total_overflow=False)
    payload, _ = await outcome(text("x" * 100_000), IN_A_THREAD, lenient)
    assert len(payload.token_ids) == 100_000


async def test_a_template_ends_between_two_of_its_outputs_when_it_is_given_up() -> None:
    left = 3

    def give_up() -> None:
        nonlocal left
        left -= 1
        if not left:
            raise InterruptedError

    template = ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}")
    messages = [{"role": "user", "content": "x"}] * 10_000
    with pytest.raises(CodecError) as caught:
        template.render(messages, give_up=give_up)
    assert isinstance(caught.value.__cause__, InterruptedError)
    assert left == 0


@given(words=st.lists(st.text(max_size=9), min_size=1, max_size=5), tools=st.integers(0, 3))
def test_the_size_of_a_prompt_is_at_least_what_is_in_it(words: list[str], tools: int) -> None:
    parts = [{"type": "text", "text": word} for word in words]
    plain: dict[str, Any] = {"messages": [{"role": "user", "content": word} for word in words] + [
        {"role": "user", "content": parts}, {"role": "user", "content": "", "other": {"a": words}}
    ]}  # fmt: skip
    found = prompt_characters(chat(**plain, tools=[TOOL] * tools), 10**9)
    assert found >= 3 * sum(map(len, words)) + tools * 60
    assert prompt_characters(text("".join(words)), 10**9) == len("".join(words))
    assert prompt_characters(text([1] * len(words)), 10**9) == len(words)
    assert prompt_characters(text(words), 10**9) >= len("".join(words))
    assert prompt_characters(chat(nvext={"token_data": [1] * 50}), 20) == 50


@given(text=st.text(), ids=st.lists(st.integers(0, 2**32 - 1)))
def test_json_that_is_written_in_steps_is_read_as_what_it_was(text: str, ids: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("operators.text.prompt_threads._CHARACTERS_AT_ONCE", 2)
        patched.setattr("operators.text.prompt_threads._IDS_AT_ONCE", 2)
        assert json.loads(json_of_text(text)) == text
        assert json.loads(json_of_ids(ids)) == ids
    assert json_of_text(text) == json.dumps(text, ensure_ascii=False)
