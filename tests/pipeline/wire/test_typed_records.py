"""Records read by structs of msgspec: the same records, and the same errors, as by the general codec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec
import pytest
from attrs import Factory, define, field, frozen
from hypothesis import assume, given
from hypothesis import strategies as st

from operators.kv import WorkerRank
from operators.kv.load import (
    ActiveSequenceEvent,
    AddRequest,
    Duration,
    Free,
    MarkPrefillCompleted,
    PrefillLoadHint,
)
from pipeline.errors import InvalidArgument
from pipeline.network.direct_events.channels import EventBatch, EventRun, PublisherState
from pipeline.protocols import PreprocessedRequest
from pipeline.protocols.field_rules import U32, U64, null, skip
from pipeline.protocols.kv import (
    ActiveLoad,
    KvCleared,
    KvEvent,
    KvRemoved,
    KvStored,
    RouterEvent,
    StoredBlock,
    StoredBlocks,
)
from pipeline.wire import from_msgpack, record_reader, to_msgpack, typed_records

u64 = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)
blocks = st.lists(st.builds(StoredBlock, u64, u64), max_size=20)
changes = (
    st.builds(KvStored, st.none() | u64, blocks, st.none() | u32)
    | st.builds(KvRemoved, st.lists(u64, max_size=9))
    | st.just(KvCleared())
)
router_events = st.builds(
    RouterEvent,
    u64,
    st.builds(KvEvent, u64, changes, u32),
    st.sampled_from(["device", "disk"]),
    st.sampled_from(["worker", "pool"]),
)
hints = st.builds(PrefillLoadHint, u64, st.none() | st.builds(Duration, u64, st.integers(0, 999_999_999)))
steps = (
    st.builds(AddRequest, st.none() | st.lists(u64, max_size=9), st.booleans(), st.none() | u32, st.none() | hints)
    | st.just(MarkPrefillCompleted())
    | st.just(Free())
)
bookings = st.builds(ActiveSequenceEvent, st.text(), st.builds(WorkerRank, u64, u32), steps, u64, st.none() | st.text())
runs = st.builds(EventRun, u64, u64, st.lists(u64, max_size=3), st.lists(st.binary(), max_size=3))
batches = st.builds(EventBatch, st.lists(st.builds(PublisherState, u64, u64), max_size=3), st.lists(runs, max_size=2))
loads = st.builds(ActiveLoad, u64, u32, st.none() | u64)
records = router_events | bookings | batches | loads


def outcome(read: Any, *arguments: Any) -> Any:
    """What it returns, or the text and the field of its error."""
    try:
        return read(*arguments)
    except InvalidArgument as error:
        return str(error), error.field


@given(records)
def test_what_was_written_is_read_as_by_the_general_codec(record: Any) -> None:
    body = to_msgpack(record)
    read = record_reader(type(record))(body)
    assert read == record == from_msgpack(body, type(record))
    assert to_msgpack(read) == body


@given(records, st.data())
def test_changed_bytes_give_the_same_record_or_the_same_error(record: Any, data: st.DataObject) -> None:
    body = bytearray(to_msgpack(record))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    kind = type(record)
    assert outcome(record_reader(kind), bytes(body)) == outcome(from_msgpack, bytes(body), kind)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(records, st.data())
def test_changed_values_give_the_same_record_or_the_same_error(record: Any, data: st.DataObject) -> None:
    plain = msgspec.msgpack.decode(to_msgpack(record))
    places: list[tuple[Any, Any]] = []
    todo = [plain]
    while todo:
        one = todo.pop()
        keys = list(one) if isinstance(one, dict) else list(range(len(one)))
        places += [(one, key) for key in keys]
        todo += [one[key] for key in keys if isinstance(one[key], dict | list)]
    assume(places)  # a record without fields has none
    holder, key = data.draw(st.sampled_from(places))
    change = data.draw(st.sampled_from(["replace", "remove", "add"]))
    if change == "replace" or isinstance(holder, list):
        holder[key] = data.draw(values)
    elif change == "remove":
        del holder[key]
    else:
        holder[data.draw(st.sampled_from(["stored", "cleared", "mm_extra_info", "new"]))] = data.draw(values)
    body, kind = msgspec.msgpack.encode(plain), type(record)
    assert outcome(record_reader(kind), body) == outcome(from_msgpack, body, kind)


def test_the_events_of_routers_are_read_by_structs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typed_records, "from_msgpack", None)
    monkeypatch.setattr(typed_records, "_readers", {})
    stored = RouterEvent(1, KvEvent(1, KvStored(None, [StoredBlock(2, 3)], 0)))
    booked = ActiveSequenceEvent("a", WorkerRank(1, 0), AddRequest([1], prefill_load_hint=PrefillLoadHint(3)), 7)
    for record in (stored, booked, EventBatch([PublisherState(1, 2)], [EventRun(1, 2, [3], [b"a"])]), ActiveLoad(1)):
        assert record_reader(type(record))(to_msgpack(record)) == record


def test_stored_blocks_are_columns_unless_one_has_media() -> None:
    event = RouterEvent(1, KvEvent(1, KvStored(5, [StoredBlock(1, 2), StoredBlock(3, 4)])))
    data = record_reader(RouterEvent)(to_msgpack(event)).event.data
    assert isinstance(data.blocks, StoredBlocks)
    assert (data.blocks.block_hashes, data.blocks.tokens_hashes) == ([1, 3], [2, 4])
    plain = msgspec.msgpack.decode(to_msgpack(event))
    plain["event"]["data"]["stored"]["blocks"][1]["mm_extra_info"] = {"mm_objects": []}
    read = record_reader(RouterEvent)(msgspec.msgpack.encode(plain))
    assert read.event.data.blocks[1].mm_extra_info is not None


@frozen
class Inner:
    """A record within others."""

    number: U64


@define
class Odd:
    """Fields of all kinds, renamed, with defaults, and one of a kind that is left to the general codec."""

    kinds: list[Literal["a", "b"]]
    inner: Inner | None = null(name="Inner")
    several: list[Inner] = skip(factory=list)
    any_value: Any = None
    flag: bool = True
    share: float | None = None


@frozen
class WithDefaultRecord:
    """Its default is a record, which no struct is made of."""

    inner: Inner = Inner(3)
    items: Sequence[Inner] = field(default=Factory(list))


@frozen
class Tree:
    """Holds records of its own type."""

    below: list[Tree] = field(factory=list)


@frozen
class Numbered:
    """Its literals are no texts, of which there are none on the wire."""

    number: Literal[1, 2]


@frozen
class Closed:
    """Takes no unknown key."""

    wire_closed: ClassVar[bool] = True

    count: U32 = 0


@pytest.mark.parametrize(
    "record",
    [
        Odd(["a"]),
        Odd(["a", "b"], Inner(1), [Inner(2)], {"x": [1]}, flag=False),
        Odd([], share=0.5),
        WithDefaultRecord(),
        WithDefaultRecord(Inner(4), [Inner(5)]),
        Closed(),
        Closed(7),
        Tree([Tree(), Tree([Tree()])]),
        PreprocessedRequest([1, 2], "m"),
    ],
)
def test_other_records_are_read_as_by_the_general_codec(record: Any) -> None:
    body = to_msgpack(record)
    assert record_reader(type(record))(body) == from_msgpack(body, type(record)) == record


@pytest.mark.parametrize("kind", [Odd, WithDefaultRecord, Closed, Tree, Numbered, RouterEvent])
@pytest.mark.parametrize(
    "plain", [{}, {"new": 1}, {"kinds": []}, {"kinds": ["c"]}, {"count": -1}, {"number": 1}, 7, None, []]
)
def test_other_values_give_the_same_record_or_the_same_error(kind: Any, plain: Any) -> None:
    body = msgspec.msgpack.encode(plain)
    assert outcome(record_reader(kind), body) == outcome(from_msgpack, body, kind)


def test_each_record_has_a_default_list_of_its_own() -> None:
    read = record_reader(Odd)
    body = msgspec.msgpack.encode({"kinds": []})
    first = read(body)
    first.several.append(Inner(1))
    assert read(body).several == []
