"""Who is registered, who hears of it, and which cards fit together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from attrs import evolve

from pipeline import InvalidArgument, Unavailable
from pipeline.network import Added, Discovery, EndpointId, Instance, Model, Put, Removed, TaintsUpdated, Written
from pipeline.network.inprocess_store import InProcessStore
from pipeline.protocols.card import ModelDeploymentCard
from pipeline.protocols.runtime_config import ModelRuntimeConfig
from pipeline.rx import AnyIOScheduler

pytestmark = pytest.mark.anyio

TTL_S = 10.0
WHERE = EndpointId("ns", "comp", "ep")


@asynccontextmanager
async def opened() -> AsyncIterator[Discovery]:
    async with AnyIOScheduler() as scheduler:
        store = InProcessStore(scheduler)
        yield Discovery(store)
        await store.close()


def instance(path: str = "ns/comp/ep", instance_id: int = 1) -> Instance:
    return Instance.of(EndpointId.parse(path), instance_id)


def card(name: str = "model-a", **changes: Any) -> ModelDeploymentCard:
    return evolve(ModelDeploymentCard.named(name, kv_cache_block_size=16), **changes)


def model(
    name: str = "model-a", instance_id: int = 1, *, where: EndpointId = WHERE, suffix: str | None = None, **changes: Any
) -> Model:
    return Model(where, instance_id, card(name, **changes), suffix)


def heard(observable: Any) -> list[Any]:
    said: list[Any] = []
    observable.subscribe(said.append)
    return said


# -- instances


async def test_instances_are_listed_by_their_path() -> None:
    """DISC-03."""
    async with opened() as discovery:
        for path in ("ns1/comp1/ep1", "ns1/comp1/ep2", "ns2/comp2/ep1"):
            await discovery.register(instance(path), ttl_s=TTL_S)
        assert len(await discovery.instances()) == 3
        assert len(await discovery.instances("ns1")) == 2
        assert len(await discovery.instances("ns1/comp1")) == 2
        assert await discovery.instances("ns1/comp1/ep2") == [instance("ns1/comp1/ep2")]
        assert await discovery.instances("ns1/comp") == []


async def test_a_watch_hears_what_is_there_and_what_comes() -> None:
    """DISC-04."""
    async with opened() as discovery:
        await discovery.register(instance(), ttl_s=TTL_S)
        said = heard(discovery.watch("ns/comp"))
        await anyio.sleep(0.05)
        lease = await discovery.register(instance(instance_id=2), ttl_s=TTL_S)
        await discovery.register(instance("ns/comp2/ep"), ttl_s=TTL_S)
        await lease.release()
        assert said == [Added(instance()), Added(instance(instance_id=2)), Removed(instance(instance_id=2))]


async def test_endpoints_with_odd_names_are_apart() -> None:
    """DISC-08, for instances."""
    names = ["a.b", "a*", "a>", "a"]
    async with opened() as discovery:
        leases = [await discovery.register(Instance.of(EndpointId("ns", "c", name), 1), ttl_s=TTL_S) for name in names]
        for name in names:
            assert [i.endpoint for i in await discovery.instances(f"ns/c/{name}")] == [name]
        await leases[1].release()
        assert sorted(i.endpoint for i in await discovery.instances()) == ["a", "a.b", "a>"]


async def test_an_instance_published_with_other_content_is_added_again() -> None:
    """DISC-17; the same content again is silent."""
    async with opened() as discovery:
        said = heard(discovery.watch())
        moved = evolve(instance(), transport={"nats_tcp": "elsewhere"})
        await discovery.register(instance(), ttl_s=TTL_S)
        await discovery.register(instance(), ttl_s=TTL_S)
        await discovery.register(moved, ttl_s=TTL_S)
        assert said == [Added(instance()), Added(moved)]


async def test_a_registration_lives_as_long_as_its_last_lease() -> None:
    """DISC-19."""
    async with opened() as discovery:
        first = await discovery.register(instance(), ttl_s=TTL_S)
        second = await discovery.register(instance(), ttl_s=TTL_S)
        await first.release()
        await first.release()
        assert await discovery.instances() == [instance()]
        await second.release()
        assert await discovery.instances() == []


async def test_an_abandoned_lease_lapses_unless_another_holds() -> None:
    async with opened() as discovery:
        said = heard(discovery.watch())
        first = await discovery.register(instance(), ttl_s=TTL_S)
        second = await discovery.register(instance(), ttl_s=TTL_S)
        first.abandon()
        await anyio.sleep(3 * TTL_S)
        assert said == [Added(instance())]
        second.abandon()
        await anyio.sleep(TTL_S + 1)
        assert said == [Added(instance()), Removed(instance())]


async def test_registering_again_in_time_saves_an_abandoned_one() -> None:
    async with opened() as discovery:
        said = heard(discovery.watch())
        (await discovery.register(instance(), ttl_s=TTL_S)).abandon()
        await anyio.sleep(TTL_S / 2)
        await discovery.register(instance(), ttl_s=TTL_S)
        await anyio.sleep(3 * TTL_S)
        assert said == [Added(instance())]


# -- cards


async def test_an_endpoint_serves_one_model() -> None:
    """DISC-14."""
    async with opened() as discovery:
        await discovery.register_model(model("model-a", 1), ttl_s=TTL_S)
        with pytest.raises(InvalidArgument) as caught:
            await discovery.register_model(model("model-b", 2, source_path="model-a"), ttl_s=TTL_S)
        for part in ("model-a", "model-b", str(WHERE)):
            assert part in str(caught.value)
        assert [m.card.display_name for m in await discovery.models()] == ["model-a"]


async def test_many_workers_share_a_model_and_endpoints_do_not() -> None:
    """DISC-16."""
    elsewhere = EndpointId("ns", "comp2", "ep")
    async with opened() as discovery:
        for other in (model("a", 1), model("a", 2), model("b", 3, where=elsewhere)):
            await discovery.register_model(other, ttl_s=TTL_S)
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
    base: dict[str, Any], adapter: dict[str, Any], fits: bool, base_first: bool
) -> None:
    both = [model("model-a", **base), model("adapter", suffix="lora-1", **adapter)]
    async with opened() as discovery:
        first, second = both if base_first else reversed(both)
        await discovery.register_model(first, ttl_s=TTL_S)
        if fits:
            await discovery.register_model(second, ttl_s=TTL_S)
        else:
            with pytest.raises(InvalidArgument):
                await discovery.register_model(second, ttl_s=TTL_S)
        assert len(await discovery.models()) == 1 + fits


class Overtaken(InProcessStore):
    """Another process registers a card between our check and our write."""

    quicker: Model | None = None

    async def create(self, key: str, value: object, *, ttl_s: float) -> Written:
        if self.quicker is not None:
            quicker, self.quicker = self.quicker, None
            await super().create(f"v1/mdc/{quicker.key}", quicker, ttl_s=ttl_s)
        return await super().create(key, value, ttl_s=ttl_s)


async def test_a_conflict_seen_after_the_write_takes_it_back() -> None:
    async with AnyIOScheduler() as scheduler:
        store = Overtaken(scheduler)
        discovery = Discovery(store)
        store.quicker = model("model-b", 2)
        with pytest.raises(InvalidArgument):
            await discovery.register_model(model("model-a", 1), ttl_s=TTL_S)
        assert [m.card.display_name for m in await discovery.models()] == ["model-b"]


def with_taints(*taints: str, **settings: Any) -> ModelRuntimeConfig:
    return ModelRuntimeConfig(taints=set(taints), **settings)


async def test_taints_are_updated_in_place() -> None:
    """DISC-10."""
    zone = {"topology_domains": {"zone": "z1"}}
    first = model(runtime_config=with_taints("first", **zone))
    async with opened() as discovery:
        said = heard(discovery.watch_models())
        await discovery.register_model(first, ttl_s=TTL_S)
        await discovery.update_taints(WHERE, 1, ["second"])
        await discovery.update_taints(WHERE, 1, ["third"])
        await discovery.register_model(first, ttl_s=TTL_S)
        await discovery.update_taints(WHERE, 1, ["third", "third"])
        assert isinstance(said[0], Added)
        assert [event.taints for event in said[1:]] == [
            ("dynamo.topology/zone=z1", "second"),
            ("dynamo.topology/zone=z1", "third"),
        ]
        assert all(isinstance(event, TaintsUpdated) for event in said[1:])
        (known,) = await discovery.models()
        assert known.card.runtime_config.taints == {"third", "dynamo.topology/zone=z1"}


async def test_a_card_does_not_change_in_place_otherwise() -> None:
    """DISC-12: the new value is refused with the reason, the old one stays."""
    async with opened() as discovery:
        said = heard(discovery.watch_models())
        await discovery.register_model(model(), ttl_s=TTL_S)
        with pytest.raises(InvalidArgument, match="cannot change in place"):
            await discovery.register_model(model("renamed"), ttl_s=TTL_S)
        with pytest.raises(InvalidArgument, match="cannot change in place"):
            await discovery.register_model(model(migration_limit=3), ttl_s=TTL_S)
        assert len(said) == 1
        assert (await discovery.models())[0].card.migration_limit == 0


@pytest.mark.parametrize("taint", ["dynamo.topology/zone=z2", "dynamo.topology/rack=1"])
async def test_reserved_taints_come_from_the_card(taint: str) -> None:
    """DISC-12."""
    first = model(runtime_config=with_taints(topology_domains={"zone": "z1"}))
    async with opened() as discovery:
        await discovery.register_model(first, ttl_s=TTL_S)
        with pytest.raises(InvalidArgument, match="reserved"):
            await discovery.update_taints(WHERE, 1, ["mine", taint])
        await discovery.update_taints(WHERE, 1, ["mine", "dynamo.topology/zone=z1"])


async def test_only_its_own_base_card_takes_taints() -> None:
    async with opened() as discovery:
        await discovery.register_model(model("adapter", suffix="lora", source_path="a"), ttl_s=TTL_S)
        with pytest.raises(InvalidArgument, match="has no card"):
            await discovery.update_taints(WHERE, 1, ["mine"])
        with pytest.raises(InvalidArgument, match="has no card"):
            await discovery.update_taints(WHERE, 2, ["mine"])


async def test_a_published_card_is_a_copy() -> None:
    shared = card()
    async with opened() as discovery:
        await discovery.register_model(Model(WHERE, 1, shared), ttl_s=TTL_S)
        shared.display_name = "changed later"
        assert (await discovery.models())[0].card.display_name == "model-a"


class Contended(InProcessStore):
    """Somebody else always writes first."""

    async def replace(self, key: str, value: object, revision: int) -> Written:
        known = await self.get(key)
        assert isinstance(known, Put)
        await super().replace(key, known.value, known.revision)
        return await super().replace(key, value, revision)


async def test_an_update_that_never_gets_through_is_given_up() -> None:
    async with AnyIOScheduler() as scheduler:
        discovery = Discovery(Contended(scheduler))
        await discovery.register_model(model(), ttl_s=TTL_S)
        with pytest.raises(Unavailable):
            await discovery.update_taints(WHERE, 1, ["mine"])
        (known,) = (m for m in await discovery.models())
        assert known.card.runtime_config.taints == set()
