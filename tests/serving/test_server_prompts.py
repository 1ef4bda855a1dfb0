"""A model whose tokenizer is at its servers only: they make tokens of prompts, and texts of answers."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest

from pipeline import Cancelled, Context, InvalidArgument
from pipeline.protocols.openai import ChatCompletionRequest, ChatMessage
from serving.http import app
from tests.engines.upstream.sglang_worlds import FakeSglang
from tests.engines.upstream.vllm_worlds import FakeVllm, Tokenizing
from tests.engines.upstream.worlds import continued
from tests.serving.upstream_worlds import ONE, TWO, Site, request, tokens
from tests.serving.worlds import chat, complete


def generated(server: FakeVllm) -> list[Any]:
    """The bodies of its requests for tokens, those of discovery left out."""
    return [one.json for one in server.requests("/v1/completions") if one.json.get("stream")]


def text(prompt: list[int], count: int) -> str:
    """What the simulated server says after a prompt."""
    return "".join(f"<{token}>" for token in continued(prompt, count))


async def test_a_prompt_and_its_answer_are_texts_of_the_server(site: Site) -> None:
    server = site.add(ONE, Tokenizing, root="org/tiny")
    async with site.graph(model_path=None) as opened:
        answer = await complete(app(opened.graph), model="tiny", prompt="héllo", max_tokens=3).run()
        assert answer.json["choices"][0]["text"] == text(list("héllo".encode()), 3)
        assert answer.json["usage"]["prompt_tokens"] == 6
        assert [sent["prompt"] for sent in generated(server)] == [list("héllo".encode())]


async def test_a_chat_is_rendered_by_the_template_of_the_server(site: Site) -> None:
    server = site.add(ONE, Tokenizing, root="org/tiny")
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    async with site.graph(model_path=None) as opened:
        fields: dict[str, Any] = {"tools": [tool], "chat_template_args": {"thinking": False}, "stream": True}
        answer = await chat(app(opened.graph), model="tiny", max_tokens=2, temperature=0.5, **fields).run()
        (asked,) = [one.json for one in server.requests("/tokenize") if one.json.get("messages")]
        assert asked["messages"] == [{"role": "user", "content": "hi"}]
        assert asked["tools"] == [tool]
        assert asked["chat_template_kwargs"] == {"thinking": False}
        assert (asked["model"], "temperature" in asked) == ("tiny", False)
        prompt = list(json.dumps({**asked, "model": None}, sort_keys=True).encode())
        assert answer.text == text(prompt, 2)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({}, {"add_generation_prompt": True}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        ({"continue_final_message": True}, {"add_generation_prompt": False, "continue_final_message": True}),
        ({"tools": [TOOL], "tool_choice": "none"}, {"add_generation_prompt": True}),
        (
            {"reasoning_effort": "none"},
            {
                "add_generation_prompt": True,
                "chat_template_kwargs": {"reasoning_effort": "none", "thinking": False, "enable_thinking": False},
            },
        ),
    ],
)
async def test_a_chat_is_rendered_as_a_local_template_would_do_it(
    site: Site, fields: dict[str, Any], sent: dict[str, Any]
) -> None:
    server = site.add(ONE, Tokenizing, root="org/tiny")
    async with site.graph(model_path=None) as opened:
        assert (await chat(app(opened.graph), model="tiny", max_tokens=1, **fields).run()).status == 200
        (asked,) = [one.json for one in server.requests("/tokenize") if one.json.get("messages")]
        assert asked == {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **sent}


async def test_a_raw_chat_is_its_text(site: Site) -> None:
    server = site.add(ONE, Tokenizing, root="org/tiny")
    async with site.graph(model_path=None) as opened:
        raw: dict[str, Any] = {"nvext": {"use_raw_prompt": True}}
        assert (await chat(app(opened.graph), model="tiny", max_tokens=1, **raw).run()).status == 200
        assert [one["prompt"] for one in generated(server)] == [list(b"hi")]


async def test_a_chat_that_begins_and_continues_an_answer_is_refused(site: Site) -> None:
    server = site.add(ONE, Tokenizing, root="org/tiny")
    async with site.graph(model_path=None) as opened:
        both: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": True}
        answer = await chat(app(opened.graph), model="tiny", **both).run()
        assert (answer.status, generated(server)) == (400, [])


async def test_prompts_of_tokens_are_not_tokenized(site: Site) -> None:
    server = site.add(ONE, Tokenizing, root="org/tiny")
    async with site.graph(model_path=None) as opened:
        before = len(server.requests("/tokenize"))
        answer = await complete(app(opened.graph), model="tiny", prompt=[5, 6, 7], max_tokens=3).run()
        assert answer.json["choices"][0]["text"] == text([5, 6, 7], 3)
        assert len(server.requests("/tokenize")) == before
        assert await tokens(opened, request()) == continued([5, 6, 7], 5)


async def test_an_answer_goes_on_at_another_server_with_its_text(site: Site) -> None:
    servers = [site.add(url, Tokenizing, root="org/tiny", token_s=0.1) for url in (ONE, TWO)]
    async with site.graph(model_path=None) as opened:
        found: list[str] = []

        async def read() -> None:
            answer = complete(app(opened.graph), model="tiny", prompt="abc", max_tokens=30, ignore_eos=True)
            found.append((await answer.run()).json["choices"][0]["text"])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await anyio.sleep(1)
            next(server for server in servers if generated(server)).kill()
        assert found == [text([97, 98, 99], 30)]
        assert [len(generated(server)) for server in servers] == [1, 1]


async def test_the_next_server_is_tried_where_one_cannot_be_reached(site: Site) -> None:
    servers = [site.add(url, Tokenizing, root="org/tiny") for url in (ONE, TWO)]
    async with site.graph(model_path=None) as opened:
        servers[0].kill()  # and nothing knows it yet
        for _ in range(2):
            assert (await complete(app(opened.graph), model="tiny", prompt="abc", max_tokens=1).run()).status == 200
        servers[1].kill()
        assert (await complete(app(opened.graph), model="tiny", prompt="abc", max_tokens=1).run()).status == 503


async def test_what_the_server_refuses_is_the_clients_mistake(site: Site) -> None:
    server = site.add(ONE, Tokenizing, root="org/tiny", context_length=100)
    async with site.graph(model_path=None) as opened:
        answer = await complete(app(opened.graph), model="tiny", prompt="a" * 200).run()
        assert (answer.status, generated(server)) == (400, [])
        invalid = await complete(app(opened.graph), model="tiny", prompt="a", temperature=9).run()
        assert invalid.status == 400


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_stop_ends_the_wait_for_the_tokens_of_a_prompt(
    site: Site, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = site.add(ONE, Tokenizing, root="org/tiny")
    async with site.graph(model_path=None) as opened:

        async def stands(*_: Any) -> None:
            await anyio.sleep_forever()

        monkeypatch.setattr(Tokenizing, "tokenize", stands)
        payload = ChatCompletionRequest(model="tiny", messages=[ChatMessage("user", "hi")])
        context = Context[Any](payload)
        raised: list[type[BaseException]] = []

        async def ask() -> None:
            try:
                await opened.graph.generate(context)
            except Cancelled as error:
                raised.append(type(error))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.sleep(1)
            getattr(context, how)()
            await anyio.sleep(0.1)
            assert raised == [Cancelled]
        assert generated(server) == []


async def test_a_server_without_a_tokenizer_is_left_out(site: Site) -> None:
    site.add(ONE, FakeVllm, root="org/tiny")
    async with site.graph(model_path=None) as opened:
        (supervisor,) = opened.supervisors
        assert isinstance(supervisor.problem, InvalidArgument)
        assert "has no tokenizer" in str(supervisor.problem)


async def test_a_server_of_another_kind_gives_no_texts_of_the_model(site: Site) -> None:
    text_server = site.add(ONE, Tokenizing, root="org/tiny")
    site.add(TWO, FakeSglang)
    async with site.graph(model_path=None) as opened:
        await anyio.sleep(5)  # it was tried beside the other one's graph
        for _ in range(4):
            answer = await complete(app(opened.graph), model="tiny", prompt="abc", max_tokens=2).run()
            assert answer.json["choices"][0]["text"] == text([97, 98, 99], 2)
        assert len(generated(text_server)) == 4
        assert "the tokenizer of 'tiny' is not on this machine" in str(opened.supervisors[1].problem)


async def test_a_folder_on_this_machine_comes_before_the_server(site: Site) -> None:
    server = site.server(ONE)
    async with site.graph() as opened:
        assert await tokens(opened, request()) == continued([5, 6, 7], 5)
        assert server.requests("/tokenize") == []
