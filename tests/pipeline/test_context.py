"""A request on its way down: what changes and what stays."""

from __future__ import annotations

from uuid import RFC_4122, UUID

import pytest

from pipeline import Context, Registry, State
from pipeline.errors import RegistryError


def test_shared_entries_are_read_with_their_type_only() -> None:
    registry = Context(None).registry
    registry.insert_shared("count", 3)
    registry.insert_shared("name", "x")
    assert registry.get("count", int) == 3
    assert registry.get("name", str) == "x"
    with pytest.raises(RegistryError, match="count"):
        registry.get("count", str)


def test_a_missing_entry_is_an_error_and_a_missing_optional_one_none() -> None:
    registry = Registry()
    with pytest.raises(RegistryError):
        registry.get("k", int)
    assert registry.get_optional("k", int) is None
    registry.insert_shared("k", "text")
    with pytest.raises(RegistryError):
        registry.get_optional("k", int)


def test_a_removed_entry_is_missing_and_others_stay() -> None:
    registry = Registry()
    registry.remove_shared("k")
    for key in "kl":
        registry.insert_shared(key, key)
    registry.remove_shared("k")
    assert [registry.get_optional(key, str) for key in "kl"] == [None, "l"]
    registry.remove_shared("l")
    registry.insert_unique("k", 1)
    registry.remove_shared("k")
    assert registry.take_unique("k", int) == 1


def test_a_unique_entry_is_taken_once_or_cloned() -> None:
    registry = Registry()
    registry.insert_unique("list", [1])
    clone = registry.clone_unique("list", list)
    clone.append(2)
    assert registry.take_unique("list", list) == [1]
    with pytest.raises(RegistryError):
        registry.take_unique("list", list)


def test_taking_with_the_wrong_type_leaves_the_entry() -> None:
    registry = Registry()
    registry.insert_unique("k", 1)
    with pytest.raises(RegistryError):
        registry.take_unique("k", str)
    assert registry.take_unique("k", int) == 1


def test_shared_and_unique_entries_are_apart() -> None:
    registry = Registry()
    registry.insert_unique("k", 1)
    with pytest.raises(RegistryError):
        registry.get("k", int)
    registry.insert_shared("k", 2)
    with pytest.raises(RegistryError):
        registry.take_unique("k", int)


def test_transfer_gives_the_payload_and_keeps_the_id() -> None:
    context = Context("A", id="one")
    old, other = context.transfer("B")
    assert (old, other.payload, other.id) == ("A", "B", "one")


def test_map_changes_the_payload_step_by_step() -> None:
    context = Context("Hello").map(len).map(lambda n: f"length is {n}")
    assert context.payload == "length is 5"


def test_a_failing_map_raises_and_leaves_the_context() -> None:
    context = Context("Hello")
    with pytest.raises(ZeroDivisionError):
        context.map(lambda _: 1 / 0)
    assert context.payload == "Hello"


def test_id_and_metadata_given_are_readable_and_metadata_is_sorted() -> None:
    context = Context(1, id="request-123", metadata={"z": "1", "tenant": "alpha"})
    assert context.id == "request-123"
    assert list(context.metadata.items()) == [("tenant", "alpha"), ("z", "1")]


def test_an_id_not_given_is_a_random_uuid() -> None:
    ids = [Context(None).id for _ in range(100)]
    assert len(set(ids)) == 100
    for one in ids:
        assert (str(UUID(one)), UUID(one).version, UUID(one).variant) == (one, 4, RFC_4122)
    assert {one[19] for one in ids} <= set("89ab")


def test_what_is_shared_stays_the_same_through_map_transfer_and_rejoining() -> None:
    context = Context("a", metadata={"k": "v"})
    context.registry.insert_shared("x", 1)
    context.add_stage("first")
    payload, bare = context.into_parts()
    for other in (context.map(len), context.transfer(2)[1], bare.with_payload(payload)):
        assert other.id == context.id
        assert other.control is context.control
        assert other.metadata == {"k": "v"}
        assert other.registry.get("x", int) == 1
        assert other.stages == ("first",)


def test_stages_are_recorded_in_the_order_the_request_passes_them() -> None:
    context = Context(1)
    context.map(str).add_stage("above")
    context.add_stage("below")
    assert context.stages == ("above", "below")


def test_a_child_has_the_id_and_a_control_of_its_own_that_follows() -> None:
    parent = Context(1, id="x")
    child = parent.child(2)
    child.stop()
    assert (child.id, parent.control.state) == ("x", State.RUNNING)
    parent.kill()
    assert child.is_killed


def test_an_unlinked_child_outlives_the_request() -> None:
    parent = Context(1)
    child = parent.child(2, linked=False)
    parent.kill()
    assert child.control.state is State.RUNNING
