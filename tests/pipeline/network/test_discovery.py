"""Registrations, watches of them, and which cards fit together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from attrs import evolve

from pipeline import InvalidArgument, Unavailable
from pipeline.network import Added, EndpointId, Instance, Model, Removed, TaintsUpdated
from pipeline.network import discovery as discovery_module
from pipeline.network.discovery import Discovery, Put, Written
from pipeline.network.inprocess import InProcessStore
from pipeline.protocols.card import ModelDeploymentCard, ModelRuntimeConfig
from pipeline.rx import AnyIOScheduler
from pipeline.wire import to_json
from tests.pipeline.network.worlds import STORE_KINDS, TTL_S, StoreWorld, eventually

WHERE = EndpointId("ns", "comp", "ep")


@pytest.fixture(params=STORE_KINDS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> StoreWorld:
    return StoreWorld(request.param, tmp_path)


@asynccontextmanager
async def opened(world: StoreWorld) -> AsyncIterator[Discovery]:
    async with world.store() as store:
        yield Discovery(store)


def instance(path: str = "ns/comp/ep", instance_id: int = 1) -> Instance:
    return Instance.of(EndpointId.parse(path), instance_id)


def card(name: str = "model-a", **changes: Any) -> ModelDeploymentCard:
    return evolve(ModelDeploymentCard.named(name, kv_cache_block_size=16), **changes)


def model(
    name: str = "model-a", instance_id: int = 1, *, where: EndpointId = WHERE, suffix: str | None = None, **changes: Any
) -> Model:
    return Model(where, instance_id, card(name, **changes), suffix)


def record(observable: Any) -> list[Any]:
    received: list[Any] = []
    observable.subscribe(received.append)
    return received


# -- instances


async def test_instances_are_listed_by_their_path(world: StoreWorld) -> None:
    async with opened(world) as discovery:
        for path in ("ns1/comp1/ep1", "ns1/comp1/ep2", "ns2/comp2/ep1"):
            await discovery.register(instance(path))
        assert len(await discovery.instances()) == 3
        assert len(await discovery.instances("ns1")) == 2
        assert len(await discovery.instances("ns1/comp1")) == 2
        assert await discovery.instances("ns1/comp1/ep2") == [instance("ns1/comp1/ep2")]
        assert await discovery.instances("ns1/comp") == []


async def test_a_watch_receives_what_is_there_and_what_comes(world: StoreWorld) -> None:
    async with opened(world) as discovery:
        await discovery.register(instance())
        received = record(discovery.watch("ns/comp"))
        await anyio.sleep(0.05)
        lease = await discovery.register(instance(instance_id=2))
        await discovery.register(instance("ns/comp2/ep"))
        await lease.release()
        await eventually(
            lambda: received == [Added(instance()), Added(instance(instance_id=2)), Removed(instance(instance_id=2))]
        )


async def test_endpoints_with_odd_names_are_apart(world: StoreWorld) -> None:
    """For instances."""
    names = ["a.b", "a*", "a>", "a/b", "a%2Fb", "a"]
    async with opened(world) as discovery:
        leases = [await discovery.register(Instance.of(EndpointId("ns", "c", name), 1)) for name in names]
        for name in names:
            assert [i.endpoint for i in await discovery.instances(EndpointId("ns", "c", name).path)] == [name]
        await leases[1].release()
        assert sorted(i.endpoint for i in await discovery.instances()) == ["a", "a%2Fb", "a.b", "a/b", "a>"]


async def test_an_instance_published_with_other_content_is_added_again(world: StoreWorld) -> None:
    """The same content again is not announced."""
    async with opened(world) as discovery:
        received = record(discovery.watch())
        moved = evolve(instance(), transport={"nats_tcp": "elsewhere"})
        await discovery.register(instance())
        await discovery.register(instance())
        await discovery.register(moved)
        await eventually(lambda: received == [Added(instance()), Added(moved)])


async def test_a_registration_lives_as_long_as_its_last_lease(world: StoreWorld) -> None:
    async with opened(world) as discovery:
        first = await discovery.register(instance())
        second = await discovery.register(instance())
        await first.release()
        await first.release()
        assert await discovery.instances() == [instance()]
        await second.release()
        assert await discovery.instances() == []


async def test_an_abandoned_lease_lapses_unless_another_holds(world: StoreWorld) -> None:
    async with opened(world) as discovery:
        received = record(discovery.watch())
        first = await discovery.register(instance())
        second = await discovery.register(instance())
        first.abandon()
        await anyio.sleep(3 * TTL_S)
        await eventually(lambda: received == [Added(instance())])
        second.abandon()
        await anyio.sleep(TTL_S + 1)
        await eventually(lambda: received == [Added(instance()), Removed(instance())])


async def test_registering_again_in_time_saves_an_abandoned_one(world: StoreWorld) -> None:
    async with opened(world) as discovery:
        received = record(discovery.watch())
        (await discovery.register(instance())).abandon()
        await anyio.sleep(TTL_S / 2)
        await discovery.register(instance())
        await anyio.sleep(3 * TTL_S)
        await eventually(lambda: received == [Added(instance())])


async def test_a_value_that_is_no_record_is_passed_over_and_removes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with AnyIOScheduler() as scheduler:
        store = InProcessStore(scheduler, TTL_S)
        discovery = Discovery(store)
        received = record(discovery.watch())
        await discovery.register(instance())
        known = f"v1/instances/{instance().key}"
        for revision, value in enumerate([b"", b"{}", b"[1]", b"\xff"]):
            await store.replace(known, value, revision)
        await store.create("v1/instances/ns/comp/ep/99", b"null")
        assert received == [Added(instance())]
        assert await discovery.instances() == []
        assert "passing over v1/instances/ns/comp/ep/99" in caplog.text
        await store.delete("v1/instances/ns/comp/ep/99")
        await store.delete(known)
        assert received == [Added(instance()), Removed(instance())]


async def test_a_release_outlasts_a_cancellation() -> None:
    class Slow(InProcessStore):
        async def delete(self, key: str) -> None:
            await anyio.sleep(1)
            await super().delete(key)

    async with AnyIOScheduler() as scheduler:
        discovery = Discovery(Slow(scheduler, TTL_S))
        lease = await discovery.register(instance())
        with anyio.CancelScope() as scope:
            scope.cancel()
            await lease.release()
        assert await discovery.instances() == []


# -- cards


async def test_an_endpoint_serves_one_model(world: StoreWorld) -> None:
    async with opened(world) as discovery:
        await discovery.register_model(model("model-a", 1))
        with pytest.raises(InvalidArgument) as caught:
            await discovery.register_model(model("model-b", 2, source_path="model-a"))
        for part in ("model-a", "model-b", str(WHERE)):
            assert part in str(caught.value)
        assert [m.card.display_name for m in await discovery.models()] == ["model-a"]


async def test_many_workers_share_a_model_and_endpoints_do_not(world: StoreWorld) -> None:
    elsewhere = EndpointId("ns", "comp2", "ep")
    async with opened(world) as discovery:
        for other in (model("a", 1), model("a", 2), model("b", 3, where=elsewhere)):
            await discovery.register_model(other)
        assert len(await discovery.models(WHERE.path)) == 2
        assert len(await discovery.models()) == 3


@pytest.mark.parametrize(
    ("base", "adapter", "fits"),
    [
        ({}, {"source_path": "model-a"}, True),
        ({"source_path": "hub/a"}, {"source_path": "hub/a"}, True),
        ({"source_path": "hub/a"}, {"source_path": "model-a"}, False),
        ({}, {}, False),
    ],
)
@pytest.mark.parametrize("base_first", [True, False])
async def test_an_adapter_belongs_to_the_base_of_its_endpoint(
    world: StoreWorld, base: dict[str, Any], adapter: dict[str, Any], fits: bool, base_first: bool
) -> None:
    both = [model("model-a", **base), model("adapter", suffix="lora-1", **adapter)]
    async with opened(world) as discovery:
        first, second = both if base_first else reversed(both)
        await discovery.register_model(first)
        if fits:
            await discovery.register_model(second)
        else:
            with pytest.raises(InvalidArgument):
                await discovery.register_model(second)
        assert len(await discovery.models()) == 1 + fits


class Overtaken(InProcessStore):
    """Another process registers a card between our check and our write."""

    quicker: Model | None = None

    async def create(self, key: str, value: bytes) -> Written:
        if self.quicker is not None:
            quicker, self.quicker = self.quicker, None
            await super().create(f"v1/mdc/{quicker.key}", to_json(quicker))
        return await super().create(key, value)


async def test_a_conflict_seen_after_the_write_takes_it_back() -> None:
    async with AnyIOScheduler() as scheduler:
        store = Overtaken(scheduler, TTL_S)
        discovery = Discovery(store)
        store.quicker = model("model-b", 2)
        with pytest.raises(InvalidArgument):
            await discovery.register_model(model("model-a", 1))
        assert [m.card.display_name for m in await discovery.models()] == ["model-b"]


async def test_a_registration_reads_only_the_cards_that_are_new(
    world: StoreWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a thousand workers of one endpoint read a million cards."""
    read: list[str] = []

    def counted(key: str, *others: Any) -> Any:
        read.append(key)
        return reads(key, *others)

    reads = discovery_module._read
    monkeypatch.setattr(discovery_module, "_read", counted)
    async with opened(world) as discovery:
        for number in range(20):
            await discovery.register_model(model(instance_id=number))
        assert len(read) == 20
        await discovery.update_taints(WHERE, 3, ["changed"])
        with pytest.raises(InvalidArgument):
            await discovery.register_model(model("model-b", 20))
        assert len(read) == 21


def with_taints(*taints: str, **settings: Any) -> ModelRuntimeConfig:
    return ModelRuntimeConfig(taints=set(taints), **settings)


async def test_taints_are_updated_in_place(world: StoreWorld) -> None:
    zone = {"topology_domains": {"zone": "z1"}}
    first = model(runtime_config=with_taints("first", **zone))
    async with opened(world) as discovery:
        received = record(discovery.watch_models())
        await discovery.register_model(first)
        await discovery.update_taints(WHERE, 1, ["second"])
        await discovery.update_taints(WHERE, 1, ["third"])
        await discovery.register_model(first)
        await discovery.update_taints(WHERE, 1, ["third", "third"])
        await eventually(lambda: len(received) == 3)
        assert isinstance(received[0], Added)
        assert [event.taints for event in received[1:]] == [
            ("dynamo.topology/zone=z1", "second"),
            ("dynamo.topology/zone=z1", "third"),
        ]
        assert all(isinstance(event, TaintsUpdated) for event in received[1:])
        (known,) = await discovery.models()
        assert known.card.runtime_config.taints == {"third", "dynamo.topology/zone=z1"}


async def test_a_card_does_not_change_in_place_otherwise(world: StoreWorld) -> None:
    """The new value is refused with the reason, the old one stays."""
    async with opened(world) as discovery:
        received = record(discovery.watch_models())
        await discovery.register_model(model())
        with pytest.raises(InvalidArgument, match="cannot change in place"):
            await discovery.register_model(model("renamed"))
        with pytest.raises(InvalidArgument, match="cannot change in place"):
            await discovery.register_model(model(migration_limit=3))
        await eventually(lambda: len(received) == 1)
        assert (await discovery.models())[0].card.migration_limit == 0


@pytest.mark.parametrize("taint", ["dynamo.topology/zone=z2", "dynamo.topology/rack=1"])
async def test_reserved_taints_come_from_the_card(world: StoreWorld, taint: str) -> None:
    first = model(runtime_config=with_taints(topology_domains={"zone": "z1"}))
    async with opened(world) as discovery:
        await discovery.register_model(first)
        with pytest.raises(InvalidArgument, match="reserved"):
            await discovery.update_taints(WHERE, 1, ["mine", taint])
        await discovery.update_taints(WHERE, 1, ["mine", "dynamo.topology/zone=z1"])


async def test_taints_of_a_card_that_the_store_has_lost_are_refused(world: StoreWorld) -> None:
    async with opened(world) as discovery:
        await discovery.register_model(model())
        (key,) = await discovery._store.entries("v1/mdc")
        await discovery._store.delete(key)
        with pytest.raises(Unavailable, match="not there now"):
            await discovery.update_taints(WHERE, 1, ["lost"])


async def test_only_its_own_base_card_takes_taints(world: StoreWorld) -> None:
    async with opened(world) as discovery:
        await discovery.register_model(model("adapter", suffix="lora", source_path="a"))
        with pytest.raises(InvalidArgument, match="has no card"):
            await discovery.update_taints(WHERE, 1, ["mine"])
        with pytest.raises(InvalidArgument, match="has no card"):
            await discovery.update_taints(WHERE, 2, ["mine"])


async def test_a_value_that_is_no_card_is_written_over() -> None:
    async with AnyIOScheduler() as scheduler:
        store = InProcessStore(scheduler, TTL_S)
        discovery = Discovery(store)
        await store.create(f"v1/mdc/{model().key}", b"broken")
        await discovery.register_model(model())
        assert [m.card.display_name for m in await discovery.models()] == ["model-a"]


async def test_a_published_card_is_a_copy(world: StoreWorld) -> None:
    shared = card()
    async with opened(world) as discovery:
        await discovery.register_model(Model(WHERE, 1, shared))
        shared.display_name = "changed later"
        assert (await discovery.models())[0].card.display_name == "model-a"


class Contended(InProcessStore):
    """A store in which another writer is always first."""

    async def replace(self, key: str, value: bytes, revision: int) -> Written:
        known = await self.get(key)
        assert isinstance(known, Put)
        await super().replace(key, known.value, known.revision)
        return await super().replace(key, value, revision)


async def test_an_update_that_never_gets_through_is_given_up() -> None:
    async with AnyIOScheduler() as scheduler:
        discovery = Discovery(Contended(scheduler, TTL_S))
        await discovery.register_model(model())
        with pytest.raises(Unavailable):
            await discovery.update_taints(WHERE, 1, ["mine"])
        (known,) = (m for m in await discovery.models())
        assert known.card.runtime_config.taints == set()
