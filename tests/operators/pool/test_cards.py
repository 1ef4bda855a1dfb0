"""The cards of a pool follow discovery."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from operators.pool import PoolCards, cards_of
from pipeline.network import Added, EndpointId, Model, Removed, TaintsUpdated
from pipeline.protocols.card import LoraInfo, ModelDeploymentCard, ModelRuntimeConfig
from pipeline.rx import Subject


def model(instance_id: int, suffix: str | None = None, name: str | None = None, **settings: Any) -> Model:
    """The card of an instance; with a suffix that of an adapter, which may have a name in it."""
    card = ModelDeploymentCard.named("m", kv_cache_block_size=4)
    lora = None if name is None else LoraInfo(name)
    return Model(
        EndpointId.parse("ns/comp/ep"),
        instance_id,
        evolve(card, runtime_config=ModelRuntimeConfig(**settings), lora=lora),
        suffix,
    )


def cards_after(*changes: Any) -> list[PoolCards]:
    """What `cards_of` emits, from the start on."""
    models: Subject[Any] = Subject()
    seen: list[PoolCards] = []
    cards_of(models).subscribe(seen.append)
    for change in changes:
        models.on_next(change)
    return seen


def test_settings_follow_the_cards_and_those_of_adapters_do_not_count() -> None:
    seen = cards_after(
        Added(model(1)),
        Added(model(2, data_parallel_size=2)),
        Added(model(1, "adapter", data_parallel_size=9)),
        TaintsUpdated(model(1, taints={"t"}), ("t",)),
        Removed(model(2)),
    )
    settings = [{i: (one.data_parallel_size, one.taints) for i, one in (cards.configs or {}).items()} for cards in seen]
    assert settings[0] == {}
    assert settings[3] == settings[2] == {1: (1, set()), 2: (2, set())}
    assert settings[4:] == [{2: (2, set()), 1: (1, {"t"})}, {1: (1, {"t"})}]


def test_adapters_follow_the_cards() -> None:
    """The card names the adapter; one that does not has the name its key ends with."""
    seen = cards_after(
        Added(model(1, "fr-1", "fr/1")),
        Added(model(2, "fr-1", "fr/1")),
        Added(model(2, "de")),
        TaintsUpdated(model(2, "de"), ("t",)),
        Removed(model(1, "fr-1", "fr/1")),
        Removed(model(2, "de")),
        Removed(model(2, "fr-1", "fr/1")),
    )
    assert [cards.adapters for cards in seen] == [
        {},
        {"fr/1": {1}},
        {"fr/1": {1, 2}},
        {"fr/1": {1, 2}, "de": {2}},
        {"fr/1": {2}, "de": {2}},
        {"fr/1": {2}},
        {},
    ]
    assert all(cards.configs == {} for cards in seen)
