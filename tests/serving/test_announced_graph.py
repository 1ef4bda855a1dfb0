"""The graph over announced workers: what clients find while workers come and go."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest
from attrs import evolve

from engines import DisaggregationMode
from operators import KvPushRouter, ModelNotFound, PrefillRouter
from pipeline import Context, Disconnected, Unavailable
from pipeline.network import EndpointId, Model, ObjectName
from pipeline.network.discovery import Added
from pipeline.network.objects import InProcessObjects
from pipeline.protocols.card import ByteLevel, ModelDeploymentCard, ModelType, WorkerType
from pipeline.rx import Subject
from pipeline.testing import ScriptedEngine
from pipeline.wire import to_json
from serving.deployment import RouterName, announced_set
from serving.deployment.announced import OPEN_S, Spread
from serving.deployment.announced_set import BUILDS_MAX, KEPT_S
from serving.deployment.routing import prefill_stage
from serving.http import app
from tests.pipeline.network.worlds import watchers
from tests.serving.announced_worlds import Cluster, answer, chat, cluster_of, first_text, text_of
from tests.serving.worlds import chat as http_chat
from tests.serving.worlds import request_to

MOCK: dict[str, Any] = {"engine": "mocker", "engine_args": {"speedup_ratio": "100"}}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster_of(tmp_path / "cache") as made:
        yield made


async def listed(service: Any) -> list[str]:
    page = await request_to(service, "/v1/models", method="GET").run()
    return [one["id"] for one in page.json["data"]]


async def health(service: Any) -> int:
    return (await request_to(service, "/health", method="GET").run()).status


# -- what is found


async def test_the_built_in_model_is_served_as_beside_its_engine(cluster: Cluster) -> None:
    await cluster.start()
    async with cluster.front() as opened:
        assert await answer(opened.graph, chat("hello")) == "hello"
        assert [one.card.display_name for one in opened.workers] == ["echo"]


async def test_a_model_is_served_from_the_files_that_its_worker_brings(cluster: Cluster, folder: Path) -> None:
    await cluster.start("tiny", model_path=folder)
    async with cluster.front() as opened:
        assert "hello" in await answer(opened.graph, chat("hello", "tiny"))
    assert any((cluster.cache / "penstock/objects").iterdir())


async def test_each_model_has_a_graph_of_its_own(cluster: Cluster, folder: Path) -> None:
    await cluster.start("Org/One")
    await cluster.start("two", model_path=folder)
    async with cluster.front() as opened:
        service = app(opened.graph)
        assert sorted(await listed(service)) == ["Org/One", "two"]
        assert await answer(opened.graph, chat("hello", "Org/One")) == "hello"
        with pytest.raises(ModelNotFound):
            await answer(opened.graph, chat("hello", "three"))
        assert (await http_chat(service, model="three").run()).status == 404


async def test_the_workers_of_a_model_share_its_requests(cluster: Cluster) -> None:
    workers = [await cluster.start() for _ in range(3)]
    async with cluster.front() as opened:
        for _ in range(6):
            await answer(opened.graph, chat("hello"))
        assert len(opened.workers) == 3
    assert {worker.endpoint.path for worker in workers} == {"penstock-echo/backend/generate"}


async def test_a_front_end_may_be_for_one_namespace(cluster: Cluster) -> None:
    await cluster.start("one")
    await cluster.start("two", worker={}, namespace="two")
    await cluster.start("new", worker={}, namespace="two-new")
    await cluster.start("twofold", worker={}, namespace="twofold")
    async with cluster.front(namespace="penstock-two") as opened:
        assert sorted(await listed(app(opened.graph))) == ["new", "two"]


# -- what comes and goes


async def test_models_come_and_go_while_it_serves(cluster: Cluster) -> None:
    async with cluster.front() as opened:
        service = app(opened.graph)
        assert (await listed(service), await health(service)) == ([], 503)
        assert (await http_chat(service, model="echo").run()).status == 503
        worker = await cluster.start()
        await anyio.sleep(0.1)
        assert (await listed(service), await health(service)) == (["echo"], 200)
        assert (await http_chat(service, model="echo").run()).status == 200
        await cluster.end(worker)
        await anyio.sleep(0.1)
        assert (await listed(service), await health(service)) == ([], 503)


async def test_a_model_whose_workers_all_left_is_unavailable_and_others_are_not_found(cluster: Cluster) -> None:
    worker = await cluster.start()
    await cluster.start("other")
    async with cluster.front() as opened:
        service = app(opened.graph)
        await cluster.end(worker)
        await anyio.sleep(0.1)
        with pytest.raises(Unavailable):
            await answer(opened.graph, chat("hello"))
        assert (await http_chat(service, model="echo").run()).status == 503
        assert (await http_chat(service, model="never").run()).status == 404
        assert await listed(service) == ["other"]
        await anyio.sleep(KEPT_S + 1)
        assert (await http_chat(service, model="echo").run()).status == 503
        await cluster.start()
        await anyio.sleep(0.1)
        assert await answer(opened.graph, chat("again")) == "again"


async def test_a_worker_that_restarts_finds_the_same_graph(cluster: Cluster) -> None:
    worker = await cluster.start()
    async with cluster.front() as opened:
        before = dict(opened.models.offers.switch.graphs)
        await cluster.kill(worker)
        await anyio.sleep(60)
        assert not opened.models.offers.switch.graphs
        again = await cluster.start()
        await anyio.sleep(0.1)
        assert again.worker_id != worker.worker_id
        assert dict(opened.models.offers.switch.graphs) == before
        assert await answer(opened.graph, chat("hello")) == "hello"


async def test_a_start_without_workers_takes_no_time(cluster: Cluster) -> None:
    began_s = anyio.current_time()
    async with cluster.front():
        assert anyio.current_time() - began_s < OPEN_S


# -- cards that disagree


async def test_workers_that_disagree_are_refused_until_they_agree_again(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    first = await cluster.start()
    async with cluster.front() as opened:
        service = app(opened.graph)
        other = await cluster.start(worker={"custom_jinja_template": _template(cluster, "{{ messages }}")})
        await anyio.sleep(0.1)
        assert (await http_chat(service, model="echo").run()).status == 503
        assert await listed(service) == []
        assert "the workers at dyn://penstock-echo.backend.generate disagree" in caplog.text
        assert "chat template" in caplog.text
        await anyio.sleep(60)
        assert caplog.text.count("disagree") == 1
        await cluster.end(other)
        await anyio.sleep(0.1)
        assert await answer(opened.graph, chat("hello")) == "hello"
        assert [one.instance_id for one in opened.workers] == [first.worker_id]


async def test_workers_that_all_changed_get_a_graph_of_their_own(cluster: Cluster) -> None:
    first = await cluster.start()
    async with cluster.front() as opened:
        assert await answer(opened.graph, chat("hello")) == "hello"
        await cluster.start(worker={"custom_jinja_template": _template(cluster, "<{{ messages[-1].content }}>")})
        await cluster.end(first)
        await anyio.sleep(0.1)
        assert await answer(opened.graph, chat("hello")) == "<hello>"


async def test_a_request_that_runs_when_workers_disagree_is_answered_to_its_end(cluster: Cluster) -> None:
    await cluster.start(engine_args={"delay_s": "1"})
    async with cluster.front() as opened, await opened.graph.generate(chat("hello")) as stream:
        first = await anext(stream)
        await cluster.start(worker={"custom_jinja_template": _template(cluster, "x")})
        assert first_text(first) + await text_of(stream) == "hello"


@pytest.mark.parametrize("router", ["round-robin", "kv"])
async def test_a_request_goes_on_while_another_graph_takes_the_place_of_its_own(
    cluster: Cluster, router: RouterName
) -> None:
    """As in a rolling restart with another template: the old worker drains while the new one serves."""
    old = await cluster.start(engine_args={"delay_s": "1"})
    async with cluster.front(router=router) as opened, anyio.create_task_group() as tasks:
        async with await opened.graph.generate(chat("hello")) as stream:
            first = await anext(stream)
            await cluster.start(worker={"custom_jinja_template": _template(cluster, "<{{ messages[-1].content }}>")})
            tasks.start_soon(cluster.end, old)
            await anyio.sleep(0.1)
            assert await answer(opened.graph, chat("hello")) == "<hello>"
            assert first_text(first) + await text_of(stream) == "hello"
        await anyio.sleep(KEPT_S + 1)
        graphs = dict(opened.models.offers.switch.graphs)
        await cluster.start("two")
        await anyio.sleep(0.1)
        assert opened.models.offers.switch.graphs["echo"] is graphs["echo"], "the end of the old graph is none of it"
        assert await answer(opened.graph, chat("hello")) == "<hello>"


async def test_a_request_moves_on_among_the_workers_from_before_others_disagreed(cluster: Cluster) -> None:
    workers = [await cluster.start(engine_args={"delay_s": "1"}) for _ in range(2)]
    async with cluster.front() as opened, await opened.graph.generate(chat("hello")) as stream:
        first = await anext(stream)
        (busy,) = [one for one in workers if one.served is not None and one.served.running]
        await cluster.start(worker={"custom_jinja_template": _template(cluster, "x")})
        await anyio.sleep(0.1)
        assert await listed(app(opened.graph)) == []
        await cluster.kill(busy)
        assert (first_text(first) + await text_of(stream)).startswith("hhello"), "the echo of another worker goes on"


async def test_a_request_never_moves_to_a_worker_that_disagrees(cluster: Cluster) -> None:
    """Its tokenizer may be another: the tokens of the request would have no meaning there."""
    old = await cluster.start(engine_args={"delay_s": "1"})
    async with cluster.front() as opened, await opened.graph.generate(chat("hello")) as stream:
        await anext(stream)
        await cluster.start(worker={"custom_jinja_template": _template(cluster, "x")})
        await anyio.sleep(0.1)
        await cluster.kill(old)
        with pytest.raises((Disconnected, Unavailable)):
            await text_of(stream)


async def test_an_instance_without_a_card_gets_no_requests(cluster: Cluster) -> None:
    worker = await cluster.start()
    engine = ScriptedEngine([])
    await cluster.runtime.serve(worker.endpoint, engine, instance_id=7)
    async with cluster.front() as opened:
        assert [await answer(opened.graph, chat("hello")) for _ in range(10)] == ["hello"] * 10
    assert engine.requests == []


async def test_a_model_takes_requests_once_a_worker_of_its_cards_is_found(cluster: Cluster) -> None:
    """Cards and instances are followed separately, so that a card may be found first."""
    served = (await cluster.start()).served
    assert served is not None
    await served.leases[0].release()
    begun_s = anyio.current_time()

    async def appear() -> None:
        await anyio.sleep(1)
        await cluster.runtime.discovery.register(served.instance)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(appear)
        async with cluster.front() as opened:
            assert anyio.current_time() - begun_s == pytest.approx(1)
            assert await answer(opened.graph, chat("hello")) == "hello"


async def test_a_card_that_cannot_be_served_ends_nothing_else(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.start()
    card = ModelDeploymentCard.named("nameless", kv_cache_block_size=16, model_input="Tokens")
    await cluster.runtime.serve("ns/backend/generate", ScriptedEngine([]), card=card)
    async with cluster.front() as opened:
        assert await answer(opened.graph, chat("hello")) == "hello"
        assert (await http_chat(app(opened.graph), model="nameless").run()).status == 503
        await anyio.sleep(600)
        assert caplog.text.count("names no tokenizer") == 1
        assert await answer(opened.graph, chat("hello")) == "hello"


async def test_cards_of_bad_peers_end_nothing(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    await cluster.start()
    nested: Any = []
    for _ in range(700):
        nested = [nested]
    good = ModelDeploymentCard.named("odd", kv_cache_block_size=16, model_input="Tokens")
    cards = [
        evolve(good, display_name="\x00\u202e" * 100, aliases=["", " ", "echo"]),
        evolve(good, router_config=nested),
        evolve(good, byte_level=ByteLevel("{% broken")),
        evolve(good, byte_level=ByteLevel("{{ messages.append(1) }}"), context_length=0),
        evolve(good, model_type=ModelType(0), worker_type=WorkerType.DECODE, needs=[[]]),
    ]
    store = cluster.runtime._store
    async with cluster.front() as opened:
        for number, bad in enumerate(cards):
            await cluster.runtime.serve(f"bad/c{number}/generate", ScriptedEngine([]), card=bad)
            record = to_json(Model(EndpointId("bad", "no such/ name", f"{number}"), number, bad))
            await store.create(f"v1/mdc/bad/twisted/{number}/1", record)
        for number, garbage in enumerate((b"", b"{", b"[]", b"null", b'{"endpoint": 1}', b"\xff" * 100)):
            await store.create(f"v1/mdc/bad/garbage/{number}/1", garbage)
        for _ in range(5):
            await anyio.sleep(10)
            assert await answer(opened.graph, chat("hello")) == "hello"
        await cluster.start("late")
        await anyio.sleep(0.1)
        assert await answer(opened.graph, chat("hello", "late")) == "hello"
    assert caplog.text.count("another model has that name") <= 2


# -- discovery is away


@pytest.mark.parametrize("ending", ["error", "end"])
async def test_what_is_known_stays_in_use_when_discovery_ends(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ending: str
) -> None:
    worker = await cluster.start()
    news: Subject[Any] = Subject()
    of_endpoint = cluster.runtime.discovery.watch_models
    monkeypatch.setattr(cluster.runtime.discovery, "watch_models", lambda path="": of_endpoint(path) if path else news)
    async with cluster.front() as opened:
        assert opened.workers == []
        assert worker.card is not None
        news.on_next(Added(Model(worker.endpoint, worker.worker_id, worker.card)))
        await anyio.sleep(0.1)
        if ending == "error":
            news.on_error(Unavailable("the broker is away"))
            assert "models are not followed: the broker is away" in caplog.text
        else:
            news.on_completed()
        await anyio.sleep(600)
        assert await answer(opened.graph, chat("hello")) == "hello"


async def test_a_front_end_that_cannot_read_what_is_there_does_not_start(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(prefix: str = "") -> list[Model]:
        raise Unavailable("the broker is away")

    monkeypatch.setattr(cluster.runtime.discovery, "models", away)
    with pytest.raises(Unavailable, match="the broker is away"):
        async with cluster.front():
            pass


# -- builds


class Flaky(InProcessObjects):
    """Objects whose fetches fail while `is_down`, and take `each_s`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_down, self.each_s = False, 0.0
        self.tries: list[float] = []
        self.at_once = self.most_at_once = 0

    async def get(self, name: ObjectName, target: Path) -> None:
        self.tries.append(anyio.current_time())
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await anyio.sleep(self.each_s)
            if self.is_down:
                raise Unavailable("the store of objects is away")
            await super().get(name, target)
        finally:
            self.at_once -= 1


@pytest.fixture
async def flaky(cluster: Cluster) -> Flaky:
    cluster.runtime.objects = made = Flaky()
    return made


async def test_a_build_that_fails_is_tried_again_with_longer_and_longer_waits(
    cluster: Cluster, flaky: Flaky, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flaky.is_down = True
    await cluster.start("tiny", model_path=folder)
    async with cluster.front() as opened:
        began_s = anyio.current_time()
        await anyio.sleep(130)
        waits_s = [round(later - before) for before, later in pairwise(flaky.tries)]
        assert waits_s[:8] == [1, 2, 4, 8, 16, 30, 30, 30]
        assert caplog.text.count("the store of objects is away") == 1
        assert (await http_chat(app(opened.graph), model="tiny").run()).status == 503
        flaky.is_down = False
        await anyio.sleep(30)
        assert await listed(app(opened.graph)) == ["tiny"]
        assert flaky.tries[0] == pytest.approx(began_s, abs=1)


async def test_a_build_that_fails_for_days_ends_nothing(
    cluster: Cluster, flaky: Flaky, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announced_set, "LONGEST_S", 1.0)
    flaky.is_down = True
    await cluster.start("tiny", model_path=folder)
    async with cluster.front() as opened:
        await anyio.sleep(1100)
        assert len(flaky.tries) > 1050
        flaky.is_down = False
        await anyio.sleep(2)
        assert await listed(app(opened.graph)) == ["tiny"]


async def test_a_change_of_its_workers_tries_a_failed_build_at_once(
    cluster: Cluster, flaky: Flaky, folder: Path
) -> None:
    flaky.is_down = True
    await cluster.start("tiny", model_path=folder)
    async with cluster.front() as opened:
        await anyio.sleep(20)  # the next try is 15 s away
        before = len(flaky.tries)
        flaky.is_down = False
        await cluster.start("other")
        await anyio.sleep(0.1)
        assert len(flaky.tries) == before, "another model is none of its workers"
        await cluster.start("tiny", model_path=folder)
        await anyio.sleep(0.1)
        assert sorted(await listed(app(opened.graph))) == ["other", "tiny"]


async def test_eight_models_are_built_at_once(cluster: Cluster, flaky: Flaky, folder: Path) -> None:
    flaky.each_s = 1.0
    for number in range(20):
        await cluster.start(f"m{number}", model_path=folder)
    async with cluster.front() as opened:
        await anyio.sleep(30)
        assert len(await listed(app(opened.graph))) == 20
    assert flaky.most_at_once == BUILDS_MAX


async def test_the_start_waits_a_while_for_models_that_are_there(cluster: Cluster, flaky: Flaky, folder: Path) -> None:
    await cluster.start("tiny", model_path=folder)
    flaky.each_s = 1.0
    async with cluster.front() as opened:
        assert await listed(app(opened.graph)) == ["tiny"]
    flaky.each_s = 100.0
    cluster.cache /= "other"
    began_s = anyio.current_time()
    async with cluster.front() as opened:
        assert anyio.current_time() - began_s == pytest.approx(OPEN_S, abs=0.1)
        assert await listed(app(opened.graph)) == []


# -- roles, routers, adapters


@pytest.mark.parametrize("router", ["round-robin", "kv"])
async def test_prompts_go_to_prefill_workers_once_they_are_there(cluster: Cluster, router: RouterName) -> None:
    await cluster.start(mode=DisaggregationMode.DECODE, **MOCK)
    async with cluster.front(router=router) as opened:
        service = app(opened.graph)
        assert await listed(service) == []
        assert (await http_chat(service, model="echo", max_tokens=3).run()).status == 503
        prefill = await cluster.start(mode=DisaggregationMode.PREFILL, **MOCK)
        await anyio.sleep(2)
        assert (await http_chat(service, model="echo", max_tokens=3).run()).status == 200
        assert [one.instance_id for one in opened.prefill_workers] == [prefill.worker_id]
        roles = (await request_to(service, "/health", method="GET").run()).json
        assert roles["status"] == "healthy"
        await cluster.end(prefill)
        await anyio.sleep(1)
        assert (await http_chat(service, model="echo", max_tokens=3).run()).status == 503
        await cluster.start(mode=DisaggregationMode.PREFILL, **MOCK)
        await anyio.sleep(2)
        assert (await http_chat(service, model="echo", max_tokens=3).run()).status == 200


async def test_prefill_workers_that_come_and_go_at_once_are_used_when_they_are_back(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.start(mode=DisaggregationMode.DECODE, worker={"may_prefill": True}, **MOCK)
    is_blocked = True

    @asynccontextmanager
    async def late(*arguments: Any) -> AsyncIterator[PrefillRouter]:
        if is_blocked:
            raise Unavailable("no worker has published its card")
        async with prefill_stage(*arguments) as stage:
            yield stage

    monkeypatch.setattr("serving.deployment.model_graph.prefill_stage", late)
    async with cluster.front(router="kv") as opened:
        prefill = await cluster.start(mode=DisaggregationMode.PREFILL, **MOCK)
        await anyio.sleep(0.1)
        await cluster.end(prefill)
        await anyio.sleep(60)
        assert caplog.text.count("no prefill worker of echo is used yet") == 1
        is_blocked = False
        await cluster.start(mode=DisaggregationMode.PREFILL, **MOCK)
        await anyio.sleep(2)
        graph = opened.models.offers.tokens.graphs["echo"]
        assert any(isinstance(stage, PrefillRouter) for stage in graph.parts())
        assert (await http_chat(app(opened.graph), model="echo", max_tokens=3).run()).status == 200


async def test_decode_workers_that_may_prefill_serve_without_prefill_workers(cluster: Cluster) -> None:
    await cluster.start(mode=DisaggregationMode.DECODE, worker={"may_prefill": True}, **MOCK)
    async with cluster.front() as opened:
        service = app(opened.graph)
        assert (await http_chat(service, model="echo", max_tokens=3).run()).status == 200
        await cluster.start(mode=DisaggregationMode.PREFILL, **MOCK)
        await anyio.sleep(2)
        graph = opened.models.offers.tokens.graphs["echo"]
        assert any(isinstance(stage, PrefillRouter) for stage in graph.parts())
        assert (await http_chat(service, model="echo", max_tokens=3).run()).status == 200


async def test_the_kv_router_knows_the_blocks_of_announced_workers(cluster: Cluster) -> None:
    args = {"block_size": "4", "num_gpu_blocks": "512", **MOCK["engine_args"]}
    for _ in range(2):
        await cluster.start(engine="mocker", engine_args=args)
    async with cluster.front(router="kv") as opened:
        (stage,) = [one for one in opened.models.offers.tokens.graphs["echo"].parts() if isinstance(one, KvPushRouter)]
        assert stage.router.block_size_tokens == 4
        for _ in range(3):
            assert await answer(opened.graph, chat("a long prompt that has many blocks", max_tokens=4))
        await anyio.sleep(1)
        assert len(opened.workers) == 2


async def test_an_adapter_is_a_model_where_it_is_loaded(cluster: Cluster) -> None:
    plain, has_it = await cluster.start(), await cluster.start(worker={"adapters": ("sql",)})
    async with cluster.front() as opened:
        service = app(opened.graph)
        assert sorted(await listed(service)) == ["echo", "sql"]
        for _ in range(4):
            assert await answer(opened.graph, chat("hello", "sql")) == "hello"
        late = await cluster.start(worker={"adapters": ("sql", "math")})
        await anyio.sleep(0.1)
        assert sorted(await listed(service)) == ["echo", "math", "sql"]
        await cluster.end(has_it)
        await cluster.end(late)
        await anyio.sleep(0.1)
        assert await listed(service) == ["echo"]
        assert (await http_chat(service, model="sql").run()).status == 503
        assert await answer(opened.graph, chat("hello")) == "hello"
        assert [one.instance_id for one in opened.workers] == [plain.worker_id]


async def test_two_sets_of_one_namespace_are_spread_over_too(cluster: Cluster) -> None:
    for component in ("backend", "other"):
        await cluster.start(worker={"component": component, "reasoning_parser": component})
    async with cluster.front(seed=1) as opened:
        assert len(opened.workers) == 2
        assert [await answer(opened.graph, chat("hello")) for _ in range(10)] == ["hello"] * 10
        graph = opened.models.offers.switch.graphs["echo"]
        assert sorted(graph.parts()[-1].branches()) == [
            "penstock-echo/backend/generate",
            "penstock-echo/other/generate",
        ]


async def test_a_model_in_two_namespaces_is_served_by_both_by_their_workers(cluster: Cluster) -> None:
    """As while a new version of its workers comes beside the old one."""
    old = [await cluster.start() for _ in range(3)]
    async with cluster.front(seed=1) as opened:
        await cluster.start(
            namespace="echo-2", worker={"custom_jinja_template": _template(cluster, "<{{ messages[-1].content }}>")}
        )
        await anyio.sleep(0.1)
        service = app(opened.graph)
        assert await listed(service) == ["echo"]
        health_page = (await request_to(service, "/health", method="GET").run()).json
        assert {role: len(members) for role, members in health_page["roles"].items()} == {"aggregated": 4}
        both = opened.models.offers.switch.graphs["echo"]
        await cluster.start("two")
        await anyio.sleep(0.1)
        assert opened.models.offers.switch.graphs["echo"] is both, "it is no other because of another model"
        answers = [await answer(opened.graph, chat("hello")) for _ in range(80)]
        assert answers.count("<hello>") in range(10, 30)
        assert answers.count("hello") == 80 - answers.count("<hello>")
        for worker in old:
            await cluster.end(worker)
        await anyio.sleep(0.1)
        assert [await answer(opened.graph, chat("hello")) for _ in range(5)] == ["<hello>"] * 5


async def test_a_request_gets_an_error_of_its_graph_when_no_worker_is_left_to_weigh() -> None:
    graphs = {name: ScriptedEngine([]) for name in ("a", "b")}
    spread = Spread(graphs, [lambda: 0, lambda: -1], Random(1))
    for _ in range(20):
        async with await spread.generate(Context(None)) as stream:
            assert await stream.collect() == []
    assert all(each.requests for each in graphs.values())


async def test_decode_workers_are_not_offered_while_the_prefill_workers_they_need_are_gone(cluster: Cluster) -> None:
    await cluster.start(mode=DisaggregationMode.DECODE, **MOCK)
    prefill = await cluster.start(mode=DisaggregationMode.PREFILL, **MOCK)
    async with cluster.front() as opened:
        service = app(opened.graph)
        await anyio.sleep(0.1)
        assert await listed(service) == ["echo"]
        await cluster.end(prefill)
        await anyio.sleep(0.1)
        assert await listed(service) == []
        assert (await http_chat(service, model="echo").run()).status == 503


# -- what operators see


async def test_the_metrics_show_workers_and_refusals(cluster: Cluster) -> None:
    await cluster.start()
    await cluster.start()
    await cluster.start("two")
    async with cluster.front() as opened:
        text = opened.native_metrics()
        assert 'dynamo_frontend_model_workers{model="echo",role="answer"} 2' in text
        assert 'dynamo_frontend_model_workers{model="two",role="answer"} 1' in text
        assert "dynamo_frontend_refused_endpoints 0" in text
        assert opened.failure is None


async def test_an_error_of_the_block_is_raised_as_it_is(cluster: Cluster) -> None:
    with pytest.raises(LookupError, match="own"):
        async with cluster.front():
            raise LookupError("own")


async def test_the_end_leaves_nothing_open(cluster: Cluster) -> None:
    await cluster.start()
    before = watchers(cluster.runtime)
    async with cluster.front(router="kv") as opened:
        assert await answer(opened.graph, chat("hello")) == "hello"
    assert watchers(cluster.runtime) == before


def _template(cluster: Cluster, source: str) -> Path:
    path = cluster.cache.parent / "template.jinja"
    path.write_text(source)
    return path
