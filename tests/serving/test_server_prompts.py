"""A model whose tokenizer is at its servers only: they make tokens of prompts, and texts of answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from attrs import define

from pipeline import Cancelled, Context, InvalidArgument
from pipeline.protocols.openai import ChatCompletionRequest, ChatMessage
from serving.http import app
from tests.edge.model_folder import write_model_folder
from tests.engines.upstream.wire import Line, Received
from tests.engines.upstream.worlds import FakeVllm, continued
from tests.serving.upstream_worlds import ONE, TWO, Site, request, site_of, tokens
from tests.serving.worlds import chat, complete


@define(eq=False)
class Tokenizing(FakeVllm):
    """A vLLM that makes tokens of prompts too."""

    async def answer(self, line: Line, received: Received) -> None:
        if received.path == "/tokenize":
            await self.tokenize(line, received.json)
        else:
            await super().answer(line, received)

    async def tokenize(self, line: Line, asked: dict[str, Any]) -> None:
        """A token for each byte of a prompt; of a chat, for each byte of its JSON with what belongs to the template."""
        text = asked["prompt"] if "prompt" in asked else json.dumps({**asked, "model": None}, sort_keys=True)
        tokens = list(text.encode())
        if len(tokens) >= self.context_length:
            await line.whole(400, {"error": {"message": "too long", "type": "BadRequestError", "code": 400}})
            return
        answer = {"count": len(tokens), "max_model_len": self.context_length, "tokens": tokens, "token_strs": None}
        await line.whole(200, answer)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    write_model_folder(folder := tmp_path / "tiny")
    async with site_of(folder) as made:
        yield made


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


async def test_a_folder_on_this_machine_comes_before_the_server(site: Site) -> None:
    server = site.server(ONE)
    async with site.graph() as opened:
        assert await tokens(opened, request()) == continued([5, 6, 7], 5)
        assert server.requests("/tokenize") == []
