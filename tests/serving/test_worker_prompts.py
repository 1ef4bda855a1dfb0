"""A model whose tokenizer is at the servers of its workers only, served by a front end in another process."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest

from engines import WorkerConfig
from pipeline import Cancelled, Context, Disconnected, InvalidArgument, PenstockError
from pipeline.network import EndpointId, Instance
from pipeline.protocols.openai import ChatCompletionRequest, ChatMessage, CompletionRequest
from pipeline.testing import ScriptedEngine
from serving.deployment.admission import Admission
from serving.deployment.model_graph import FOUND_S
from serving.deployment.worker_prompts import (
    PromptTokens,
    prompt_workers,
    prompts_endpoint,
    serving_prompts,
)
from serving.http import app, served
from tests.engines.upstream.sglang_worlds import FakeSglang
from tests.engines.upstream.vllm_worlds import FakeVllm, Tokenizing
from tests.engines.upstream.worlds import continued
from tests.pipeline.network.worlds import deployment
from tests.serving.announced_worlds import first_text, text_of
from tests.serving.upstream_worlds import ONE, TWO, Site
from tests.serving.worker_prompt_worlds import processes, write_template
from tests.serving.worlds import chat, complete

BACKEND = EndpointId("ns", "backend", "generate")


def generated(server: FakeVllm) -> list[Any]:
    """The bodies of its requests for tokens, those of discovery left out."""
    return [one.json for one in server.requests("/v1/completions") if one.json.get("stream")]


def text(prompt: list[int], count: int) -> str:
    """What the simulated server says after a prompt."""
    return "".join(f"<{token}>" for token in continued(prompt, count))


def completion(prompt: str, tokens: int) -> Context[Any]:
    """A completion of just so many tokens."""
    return Context(CompletionRequest(model="tiny", prompt=prompt, max_tokens=tokens, ignore_eos=True))


async def test_a_front_end_serves_texts_of_a_server_without_files_of_its_model(site: Site) -> None:
    server = site.add(ONE, Tokenizing, root="org/tiny", context_length=2000)
    async with processes(site) as there:
        (card,) = [one.card for one in await there.runtime.discovery.models()]
        assert (card.tokenizes, card.model_input, card.files) == (True, "Tokens", (None,) * 5)
        assert list(served(there.front.graph)) == ["tiny"]
        answer = await complete(app(there.front.graph), model="tiny", prompt="héllo", max_tokens=3).run()
        assert answer.json["choices"][0]["text"] == text(list("héllo".encode()), 3)
        assert answer.json["usage"]["prompt_tokens"] == 6
        assert [sent["prompt"] for sent in generated(server)] == [list("héllo".encode())]
        too_long = await complete(app(there.front.graph), model="tiny", prompt=[1] * 2001).run()
        assert (too_long.status, len(generated(server))) == (400, 1)


async def test_a_chat_is_rendered_by_the_server_of_a_worker(site: Site) -> None:
    server = site.add(ONE, Tokenizing, root="org/tiny")
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    async with processes(site) as there:
        fields: dict[str, Any] = {"tools": [tool], "chat_template_args": {"thinking": False}, "stream": True}
        answer = await chat(app(there.front.graph), model="tiny", max_tokens=4, **fields).run()
        (asked,) = [one.json for one in server.requests("/tokenize") if one.json.get("messages")]
        assert asked == {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hi"}],
            "add_generation_prompt": True,
            "tools": [tool],
            "chat_template_kwargs": {"thinking": False},
        }
        prompt = list(json.dumps({**asked, "model": None}, sort_keys=True).encode())
        assert answer.text == text(prompt, 4)
        assert len([one for one in answer.chunks if one["choices"] and one["choices"][0]["delta"].get("content")]) == 4


async def test_stop_strings_are_found_at_the_server_of_a_worker(site: Site) -> None:
    server = site.add(ONE, Tokenizing, root="org/tiny")
    async with processes(site) as there:
        second = continued([97], 2)[1]
        answer = await complete(app(there.front.graph), model="tiny", prompt="a", stop=f"<{second}>").run()
        assert generated(server)[0]["stop"] == [f"<{second}>"]
        assert answer.status == 200


async def test_prompts_of_tokens_are_not_sent_to_be_tokenized(site: Site) -> None:
    server = site.add(ONE, Tokenizing, root="org/tiny")
    async with processes(site) as there:
        before = len(server.requests("/tokenize"))
        answer = await complete(app(there.front.graph), model="tiny", prompt=[5, 6, 7], max_tokens=3).run()
        assert answer.json["choices"][0]["text"] == text([5, 6, 7], 3)
        assert len(server.requests("/tokenize")) == before


async def test_the_kv_router_routes_texts_by_the_tokens_of_the_server(site: Site) -> None:
    servers = [site.add(url, Tokenizing, root="org/tiny") for url in (ONE, TWO)]
    async with processes(site, router="kv") as there:
        for _ in range(4):
            answer = await complete(app(there.front.graph), model="tiny", prompt="a" * 200, max_tokens=1).run()
            assert answer.status == 200
        assert sorted(len(generated(server)) for server in servers) == [0, 4]


async def test_adapters_of_a_server_have_its_tokenizer(site: Site) -> None:
    server = site.add(ONE, Tokenizing, root="org/tiny", adapters=("french",))
    async with processes(site) as there:
        assert sorted(served(there.front.graph)) == ["french", "tiny"]
        answer = await complete(app(there.front.graph), model="french", prompt="abc", max_tokens=2).run()
        assert answer.json["choices"][0]["text"] == text([97, 98, 99], 2)
        assert server.requests("/tokenize")[-1].json == {"model": "tiny", "prompt": "abc"}
        assert generated(server)[0]["model"] == "french"


# -- what goes wrong


async def test_what_the_server_of_a_worker_refuses_is_the_clients_mistake(site: Site) -> None:
    server = site.add(ONE, Tokenizing, root="org/tiny", context_length=100)
    async with processes(site) as there:
        answer = await complete(app(there.front.graph), model="tiny", prompt="a" * 200).run()
        assert (answer.status, generated(server)) == (400, [])
        assert "too long" in answer.json["message"]


async def test_another_worker_makes_the_tokens_where_a_server_has_just_died(site: Site) -> None:
    servers = [site.add(url, Tokenizing, root="org/tiny") for url in (ONE, TWO)]
    async with processes(site) as there:
        servers[0].kill()  # and nothing knows it yet
        for _ in range(2):
            answer = await complete(app(there.front.graph), model="tiny", prompt="abc", max_tokens=1).run()
            assert answer.status == 200
        servers[1].kill()
        for wait_s in (0.0, 5.0):  # before the workers have left, and after
            await anyio.sleep(wait_s)
            answer = await complete(app(there.front.graph), model="tiny", prompt="abc", max_tokens=1).run()
            assert answer.status == 503
        servers[0].restart()
        await anyio.sleep(10)
        answer = await complete(app(there.front.graph), model="tiny", prompt="abc", max_tokens=1).run()
        assert answer.json["choices"][0]["text"] == text([97, 98, 99], 1)


@pytest.mark.parametrize("dies", ["server", "worker"])
async def test_a_text_goes_on_at_another_worker(site: Site, dies: str) -> None:
    servers = {url: site.add(url, Tokenizing, root="org/tiny", token_s=0.1) for url in (ONE, TWO)}
    async with processes(site) as there, await there.front.graph.generate(completion("abc", 30)) as stream:
        begun = "".join([first_text(await anext(stream)) for _ in range(5)])
        (busy,) = [url for url, server in servers.items() if generated(server)]
        if dies == "server":
            servers[busy].kill()
        else:
            there.worker(busy).abort()
        assert begun + await text_of(stream) == text([97, 98, 99], 30)
        assert [len(generated(server)) for server in servers.values()] == [1, 1]
        await anyio.sleep(0.1)
        assert servers[busy].running == {}


async def test_a_text_without_another_worker_ends_in_a_typed_error(site: Site) -> None:
    site.add(ONE, Tokenizing, root="org/tiny", token_s=0.1)
    async with processes(site) as there, await there.front.graph.generate(completion("abc", 30)) as stream:
        await anext(stream)
        there.worker(ONE).abort()
        with pytest.raises(Disconnected):
            await text_of(stream)


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_stop_reaches_the_server_that_makes_tokens_for_a_worker(
    site: Site, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = site.add(ONE, Tokenizing, root="org/tiny")
    async with processes(site) as there:
        begun = anyio.Event()

        async def stands(*_: Any) -> None:
            begun.set()
            await anyio.sleep_forever()

        monkeypatch.setattr(Tokenizing, "tokenize", stands)
        context = Context[Any](ChatCompletionRequest(model="tiny", messages=[ChatMessage("user", "hi")]))
        raised: list[type[BaseException]] = []

        async def ask() -> None:
            try:
                await there.front.graph.generate(context)
            except Cancelled as error:
                raised.append(type(error))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await begun.wait()
            was_open = server.open
            getattr(context, how)()
            await anyio.sleep(0.1)
            assert (raised, server.open) == ([Cancelled], was_open - 1)
        assert generated(server) == []


@pytest.mark.parametrize("how", ["stop", "kill", "close"])
async def test_the_end_of_an_answer_reaches_the_server_of_its_worker(site: Site, how: str) -> None:
    server = site.add(ONE, Tokenizing, root="org/tiny", token_s=0.1)
    async with processes(site) as there:
        context = completion("abc", 1000)
        async with await there.front.graph.generate(context) as stream:
            await anext(stream)
            assert len(server.running) == 1
            if how == "close":
                await stream.aclose()
            else:
                getattr(context, how)()
            await anyio.sleep(0.2)
            assert server.running == {}


# -- what is not served


async def test_workers_with_and_without_files_of_a_model_disagree(
    site: Site, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for url in (ONE, TWO):
        site.add(url, Tokenizing, root="org/tiny")
    async with processes(site, workers={ONE: {"model_path": folder}}) as there:
        assert len(await there.runtime.discovery.models()) == 2
        assert (await complete(app(there.front.graph), model="tiny", prompt="abc").run()).status == 503
    assert "tokenizes (True, not none)" in caplog.text or "tokenizes (none, not True)" in caplog.text


async def test_a_chat_template_beside_that_of_the_server_is_refused(
    site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site.add(ONE, Tokenizing, root="org/tiny")
    worker = WorkerConfig(namespace="penstock", custom_jinja_template=write_template(tmp_path))
    async with processes(site, workers={ONE: {"worker": worker}}) as there:
        assert await there.runtime.discovery.models() == []
    (record,) = [one for one in caplog.records if "custom_jinja_template" in one.message]
    assert (record.levelname, "rendered by its servers" in record.message) == ("ERROR", True)


async def test_a_server_without_a_tokenizer_of_use_is_no_worker(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.add(ONE, Tokenizing, root="org/tiny")
    site.add(TWO, FakeSglang)
    async with processes(site) as there:
        assert [one.instance_id for one in await there.runtime.discovery.models()] == [there.worker(ONE).worker_id]
        assert there.supervisors[TWO].worker is None
    assert (
        f"{TWO} is left out: InvalidArgument (model_path): the tokenizer of 'tiny' is not on this machine"
        in caplog.text
    )


# -- the request plane's part


class Repeats:
    """A server whose tokens are those that it is given."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []

    async def prompt_tokens(self, body: Any) -> list[int]:
        self.bodies.append(body)
        return list(body["ids"])


async def test_only_admitted_workers_make_tokens() -> None:
    async with deployment() as network, network.runtime() as runtime, network.runtime() as caller:
        admission, one, other = Admission(), Repeats(), Repeats()
        async with (
            serving_prompts(runtime, BACKEND, 1, one),
            serving_prompts(runtime, BACKEND, 2, other),
            prompt_workers(BACKEND, caller, admission) as present,
        ):
            assert present() == []
            admission.admit({2, 3})
            (server,) = present()
            assert await server.prompt_tokens({"ids": [7, 2**32 - 1], "more": [{"a": None}]}) == [7, 2**32 - 1]
            assert (one.bodies, other.bodies) == ([], [{"ids": [7, 2**32 - 1], "more": [{"a": None}]}])


async def test_a_front_end_waits_a_while_for_the_first_worker_that_makes_tokens() -> None:
    async with deployment() as network, network.runtime() as runtime, network.runtime() as caller:
        admission = Admission()
        admission.admit({1})
        begun_s = anyio.current_time()
        async with prompt_workers(BACKEND, caller, admission) as present:
            assert (present(), anyio.current_time() - begun_s) == ([], FOUND_S)

        async def serve_late() -> None:
            await anyio.sleep(1)
            async with serving_prompts(runtime, BACKEND, 1, Repeats()):
                await anyio.sleep(1)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve_late)
            async with prompt_workers(BACKEND, caller, admission) as present:
                (server,) = present()
                assert await server.prompt_tokens({"ids": [1]}) == [1]


async def test_workers_that_cannot_be_reached_make_no_tokens_while_others_can() -> None:
    async with deployment() as network, network.runtime() as runtime, network.runtime() as caller:
        where, admission = prompts_endpoint(BACKEND), Admission()
        admission.admit({1, 2})
        dead = Instance(where.namespace, where.component, where.endpoint, 2, transport={"tcp": "127.0.0.1:65000"})
        await runtime.discovery.register(dead)
        async with prompt_workers(BACKEND, caller, admission) as present:
            await anyio.sleep(1)
            assert len(present()) == 1, "without another one it is tried"
            async with serving_prompts(runtime, BACKEND, 1, Repeats()):
                await anyio.sleep(1)
                (server,) = present()
                assert await server.prompt_tokens({"ids": [1]}) == [1]


@pytest.mark.parametrize("answer", [[], [PromptTokens([2**32])], ["no tokens"]])
async def test_a_worker_that_gives_no_tokens_is_a_typed_error(answer: list[Any]) -> None:
    async with deployment() as network, network.runtime() as runtime, network.runtime() as caller:
        admission = Admission()
        admission.admit({1})
        served_there = await runtime.serve(prompts_endpoint(BACKEND), ScriptedEngine(answer), instance_id=1)
        async with prompt_workers(BACKEND, caller, admission) as present:
            (server,) = present()
            with pytest.raises(PenstockError) as raised:
                await server.prompt_tokens({"ids": [1]})
        await served_there.close(0)
    assert isinstance(raised.value, Disconnected) is (answer == [])


async def test_the_request_for_tokens_is_of_its_form() -> None:
    async with (
        deployment() as network,
        network.runtime() as runtime,
        network.runtime() as caller,
        serving_prompts(runtime, BACKEND, 1, Repeats()),
    ):
        with closing(caller.workers(prompts_endpoint(BACKEND), PromptTokens)) as workers:
            await workers.wait_for_instances()
            for wrong in (None, {"body": [1]}, {"ids": [1]}):
                with pytest.raises(InvalidArgument):
                    async with await workers.engine(1).generate(Context[Any](wrong)) as stream:
                        await anext(stream)
