"""Discovery: which instances serve an endpoint, and which models they serve.

    register ──► store ──► watch: Added, Removed, TaintsUpdated

Records are stored as JSON; a value that is not JSON is ignored and does not remove a known record.

Source: dynamo lib/runtime/src/discovery. Other than there, leases and conflict rules are written once, over any store.

Store: keys and values that every process of a deployment sees, with revisions, leases and watches.

A discovery backend implements only this. It needs what a key-value bucket of NATS offers: create, replace by revision,
delete, watch a prefix, and a time to live for each key, which its owner renews.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Generic, Literal, TypeVar

import anyio
from anyio.lowlevel import checkpoint
from attrs import asdict, evolve, frozen

from pipeline import InvalidArgument, Unavailable
from pipeline.protocols.card import TOPOLOGY_TAINT_PREFIX, ModelDeploymentCard
from pipeline.protocols.field_rules import U64
from pipeline.rx import Observable, ObserverBase, ops
from pipeline.wire import from_json, to_json

from .names import EndpointId, Instance, escaped, instance_key


@frozen
class Put:
    """A key has been set to this value."""

    key: str
    value: bytes
    revision: int


@frozen
class Gone:
    """A key is gone: deleted, or its lease ran out."""

    key: str


Change = Put | Gone


@frozen
class Written:
    """The result of a write, with the present revision.

    `created`: it was done. `exists`: the key exists and keeps its value. `missing`: there is nothing to replace.
    `retry`: the key was written in between.
    """

    outcome: Literal["created", "exists", "missing", "retry"]
    revision: int = 0


class Store(ABC):
    """See the module. Keys are parts between slashes, the first ones the bucket; they may hold any text.

    A key lives as long as the process that wrote it last keeps renewing it, which the store does by itself. A key
    abandoned by a crash expires within the store's time to live. No call waits for ever.
    """

    async def open(self) -> None:
        """Connect. Called once, before anything else. Raise CannotConnect if the store cannot be reached."""
        await checkpoint()

    @abstractmethod
    async def create(self, key: str, value: bytes) -> Written:
        """Write a new key; an existing key is not changed."""

    @abstractmethod
    async def replace(self, key: str, value: bytes, revision: int) -> Written:
        """Write a known key if it still has that revision; a concurrent delete wins."""

    @abstractmethod
    async def delete(self, key: str) -> None:
        """Remove the key; a missing one is fine. If that fails, the key is no longer renewed."""

    @abstractmethod
    async def get(self, key: str) -> Put | None:
        """Return the key's value and revision, None if there is none."""

    @abstractmethod
    async def entries(self, prefix: str = "") -> dict[str, bytes]:
        """Return all values under the prefix, by full key, in the order of keys."""

    @abstractmethod
    def watch(self, prefix: str = "") -> Observable[Change]:
        """Return what is under the prefix now, then every change: without gaps or repetition, up to the last state.

        It completes when the store is closed. Disposing ends the watch.
        """

    @abstractmethod
    def abandon(self, key: str) -> None:
        """Stop renewing the key."""

    @abstractmethod
    async def close(self) -> None:
        """Remove all keys of this process and complete all watches."""


T = TypeVar("T")

_log = logging.getLogger(__name__)

INSTANCES, MODELS = "v1/instances", "v1/mdc"
_ATTEMPTS = 8
"""Attempts at a write that conflicts with other writers."""


@frozen
class Model:
    """A card as one instance serves it; with a suffix it is an adapter on that instance."""

    endpoint: EndpointId
    instance_id: U64
    card: ModelDeploymentCard
    suffix: str | None = None

    @property
    def key(self) -> str:
        base = instance_key(self.endpoint, self.instance_id)
        return base if self.suffix is None else f"{base}/{escaped(self.suffix)}"


@frozen
class Added(Generic[T]):
    """An instance or model has appeared, or an instance was published again with other content."""

    item: T


@frozen
class Removed(Generic[T]):
    """An instance or model is gone; this is its last known state."""

    item: T


@frozen
class TaintsUpdated:
    """Only the taints of a known card changed; they are sorted."""

    item: Model
    taints: tuple[str, ...]


class Lease:
    """One holder's share in a registration, renewed by the store until it is released.

    The last share that is released removes the registration at once; the last one abandoned, as by a crash, lets it
    lapse within its time to live.
    """

    def __init__(self, shares: dict[str, int], store: Store, key: str) -> None:
        shares[key] = shares.get(key, 0) + 1
        self._shares, self._store, self._key = shares, store, key
        self._is_held = True

    async def release(self) -> None:
        """Release the share; a second call does nothing. A cancellation waits until this is done."""
        if self._was_last():
            with anyio.CancelScope(shield=True):
                await self._store.delete(self._key)

    def abandon(self) -> None:
        """Stop renewing."""
        if self._was_last():
            self._store.abandon(self._key)

    def _was_last(self) -> bool:
        if not self._is_held:
            return False
        self._is_held = False
        self._shares[self._key] -= 1
        if self._shares[self._key]:
            return False
        del self._shares[self._key]
        return True


class Discovery:
    """The registrations of one runtime, and a view of those of all runtimes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._shares: dict[str, int] = {}
        self._cards: dict[str, dict[str, tuple[bytes, Model | None]]] = {}
        """By endpoint: its cards when they were last merged, and the result."""

    async def register(self, instance: Instance) -> Lease:
        """Publish the instance, again if it is published with other content."""
        key, value = f"{INSTANCES}/{instance.key}", to_json(instance)
        await self._write(key, value, lambda _: value)
        return Lease(self._shares, self._store, key)

    async def register_model(self, model: Model) -> Lease:
        """Publish the card; the same card again keeps taints that were updated meanwhile.

        Raise InvalidArgument, and change nothing, if the instance has another card there already, or if the endpoint
        serves another model.
        """
        key, value = f"{MODELS}/{model.key}", to_json(model)
        model = from_json(value, Model)  # to be compared with what others wrote
        await self._check_conflict(model)
        await self._write(key, value, lambda known: known if _is_kept(key, known, model) else value)
        lease = Lease(self._shares, self._store, key)
        try:
            await self._check_conflict(model)  # another runtime may have been first
        except BaseException:
            await lease.release()
            raise
        return lease

    async def update_taints(self, endpoint: EndpointId, instance_id: int, taints: Iterable[str]) -> None:
        """Set the caller's taints on the base card of an instance of this runtime; those of its topology stay.

        Raise InvalidArgument for a card of another runtime and for a reserved taint that is not the card's own, and
        Unavailable if others kept changing the card, or if it is not in the store now, as after an outage.
        """
        key = f"{MODELS}/{instance_key(endpoint, instance_id)}"
        if key not in self._shares:
            raise InvalidArgument(f"this process has no card at {endpoint.path}/{instance_id}")
        wanted = frozenset(taints)
        if not await self._replace(key, lambda known: to_json(_with_taints(from_json(known, Model), wanted))):
            raise Unavailable(f"{key} is not there now")

    async def instances(self, prefix: str = "") -> list[Instance]:
        """Return all, or those of a namespace, component or endpoint, given as its path (`ns/comp`)."""
        return await self._list(_under(INSTANCES, prefix), Instance)

    async def models(self, prefix: str = "") -> list[Model]:
        """Return all cards, or those under the path."""
        return await self._list(_under(MODELS, prefix), Model)

    def watch(self, prefix: str = "") -> Observable[Added[Instance] | Removed[Instance]]:
        """Return the instances under the path as they are now, then every change, while the runtime is open."""
        return self._watch(_under(INSTANCES, prefix), Instance, lambda known, new: None if new == known else Added(new))

    def watch_models(self, prefix: str = "") -> Observable[Added[Model] | Removed[Model] | TaintsUpdated]:
        """Return the cards under the path as they are now, then every change. A card changes in its taints only."""
        return self._watch(_under(MODELS, prefix), Model, _model_event)

    async def _list(self, prefix: str, kind: type[T]) -> list[T]:
        found = (_read(key, value, kind) for key, value in (await self._store.entries(prefix)).items())
        return [record for record in found if record is not None]

    def _watch(self, prefix: str, kind: type[T], event: Callable[[T | None, T], Any]) -> Observable[Any]:
        def subscribe(observer: ObserverBase[Any], scheduler: Any = None) -> Any:
            known: dict[str, T] = {}

            def translate(change: Change) -> Any:
                if isinstance(change, Gone):
                    return Removed(known.pop(change.key)) if change.key in known else None
                if (record := _read(change.key, change.value, kind)) is None:
                    return None
                if (found := event(known.get(change.key), record)) is not None:
                    known[change.key] = record
                return found

            events = ops.map(translate)(self._store.watch(prefix))
            return ops.filter(lambda found: found is not None)(events).subscribe(observer, scheduler=scheduler)

        return Observable(subscribe)

    async def _check_conflict(self, model: Model) -> None:
        """Read only cards that are new since the last call: with many workers there are many cards."""
        prefix = _under(MODELS, model.endpoint.path)
        before = self._cards.get(prefix, {})
        self._cards[prefix] = cards = {
            key: known if (known := before.get(key)) and known[0] == value else (value, _read(key, value, Model))
            for key, value in (await self._store.entries(prefix)).items()
        }
        if (problem := conflict((card for _, card in cards.values() if card is not None), model)) is not None:
            raise InvalidArgument(problem, field="display_name")

    async def _write(self, key: str, value: bytes, changed: Callable[[bytes], bytes]) -> None:
        """Create the key, or replace its value by `changed(value)`, which also renews an abandoned key."""
        for _ in range(_ATTEMPTS):
            if (await self._store.create(key, value)).outcome == "created":
                return
            if await self._replace(key, changed):
                return
        raise Unavailable(f"{key} keeps changing")

    async def _replace(self, key: str, changed: Callable[[bytes], bytes]) -> bool:
        """Replace the value by `changed(value)`; False if there is none. Raise Unavailable as `update_taints`."""
        for _ in range(_ATTEMPTS):
            if (known := await self._store.get(key)) is None:
                return False
            written = await self._store.replace(key, changed(known.value), known.revision)
            if written.outcome != "retry":
                return written.outcome == "created"
        raise Unavailable(f"{key} keeps changing")


def conflict(known: Iterable[Model], new: Model) -> str | None:
    """Return why the card conflicts with those of its endpoint, None if it does not.

    Base cards share the display name. An adapter belongs to a base model, known by its source path.
    """
    for other in known:
        if (other.instance_id, other.suffix) == (new.instance_id, new.suffix):
            continue
        if other.suffix is None and new.suffix is None:
            fits = other.card.display_name == new.card.display_name
        else:
            both_adapters = other.suffix is not None and new.suffix is not None
            fits = both_adapters or other.card.effective_source_path == new.card.effective_source_path
        if not fits:
            return f"{new.endpoint} serves {other.card.display_name!r}, so it cannot serve {new.card.display_name!r}"
    return None


def _under(bucket: str, prefix: str) -> str:
    return f"{bucket}/{prefix}" if prefix else bucket


def _read(key: str, value: bytes, kind: type[T]) -> T | None:
    """Return the record, None if there is none in the value."""
    try:
        return from_json(value, kind)
    except InvalidArgument as error:
        _log.warning("passing over %s: %s", key, error)
        return None


def _is_kept(key: str, value: bytes, again: Model) -> bool:
    """Return whether the stored value and its taints stay when the card is registered again; False if it is no card."""
    if (known := _read(key, value, Model)) is None:
        return False
    if _fixed(known.card) != _fixed(again.card):
        raise InvalidArgument(
            f"the card of {known.card.display_name!r} at {known.key} cannot change in place except for its taints"
        )
    return True


def _fixed(card: ModelDeploymentCard) -> dict[str, Any]:
    """Return the card without its changeable fields."""
    content = asdict(card)
    del content["mdc_sum"], content["runtime_config"]["taints"]
    return content


def _with_taints(model: Model, taints: frozenset[str]) -> Model:
    settings = model.card.runtime_config
    own = {taint for taint in settings.taints if taint.startswith(TOPOLOGY_TAINT_PREFIX)}
    for taint in taints:
        if taint.startswith(TOPOLOGY_TAINT_PREFIX) and taint not in own:
            raise InvalidArgument(f"taint {taint!r} is reserved: it comes from the card's topology", field="taints")
    return evolve(model, card=evolve(model.card, runtime_config=evolve(settings, taints=set(taints))))


def _model_event(known: Model | None, found: Model) -> Added[Model] | TaintsUpdated | None:
    if known is None:
        return Added(found)
    taints = found.card.runtime_config.taints
    if taints == known.card.runtime_config.taints or _fixed(found.card) != _fixed(known.card):
        return None
    return TaintsUpdated(found, tuple(sorted(taints)))
