"""Worker sets: what the cards that workers announce make together, decided without a loop.

    cards ──► by endpoint ─┬─► agree ──► WorkerSet: a model, a role, its workers, their adapters
                           └─► disagree, or cannot be served ──► refused, with the reason
    sets  ──► by namespace ──► those that answer, each with the set that prefills for it

Workers are one set by their endpoint, for it is an endpoint that requests are routed to: so all cards of an endpoint
must describe the same model.

Source: dynamo lib/llm/src/discovery, the worker sets of its watcher and controller. Other than there, a set is an
endpoint, so that workers of two models or roles at one endpoint disagree, where a folder lies does not count, and
prefill workers must have the tokenizer of those they prefill for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import evolve, field, frozen

from pipeline.network import EndpointId, Model
from pipeline.protocols.card import ModelDeploymentCard, ModelType, WorkerType

_TEXT = ModelType.Chat | ModelType.Completions
_FILES = ("config", "tokenizer", "tokenizer config", "chat template", "generation config")
"""The files of a card's checksum in their order."""
_SHOWN_CHARACTERS = 60
"""Of a value in a message."""
_SHOWN_INSTANCES = 4
"""Of a group in a message."""


@frozen(eq=False)
class Announced:
    """A card as a worker announces it, read once."""

    model: Model
    key: str
    """Where it is in discovery."""
    path: str
    """The path of its endpoint."""
    facts: str
    """What the cards of one set must agree in, as JSON."""
    names: tuple[str, ...]
    """The names that clients have for the model, or for the adapter; none where no request in text is served."""

    @classmethod
    def of(cls, model: Model) -> Announced:
        """Return the card with what is read from it."""
        card = model.card
        names = (card.display_name, *card.aliases) if model.suffix is None else (_adapter_name(model),)
        facts = json.dumps(facts_of(card), sort_keys=True)
        return cls(
            model, model.key, model.endpoint.path, facts, tuple(filter(str.strip, names)) if _is_answering(card) else ()
        )


@frozen(eq=False)
class WorkerSet:
    """The workers at one endpoint, whose cards agree."""

    endpoint: EndpointId
    members: tuple[Model, ...]
    """Their cards, in the order of their keys."""
    identity: str
    """What a graph over them is built from: it stays the same while workers come and go."""
    adapters: Mapping[str, frozenset[int]] = field(factory=dict)
    """The LoRA adapters by name, with the workers that have each."""

    @property
    def card(self) -> ModelDeploymentCard:
        """The first card; they agree in what a front end must know."""
        return self.members[0].card

    @property
    def name(self) -> str:
        """The model's name."""
        return self.card.display_name

    @property
    def role(self) -> WorkerType:
        """What part of a request they serve."""
        return self.card.role

    @property
    def is_answering(self) -> bool:
        """Whether requests in text can be sent to them."""
        return _is_answering(self.card)


@frozen(eq=False)
class Answering:
    """A set that answers requests, and the one that prefills for it, if there is one."""

    workers: WorkerSet
    prefill: WorkerSet | None = None
    missing: str = ""
    """Which other workers its requests need; empty if they are there."""

    def adapter_workers(self, name: str) -> set[int]:
        """Return the workers of both sets that have the adapter."""
        return {one for each in (self.workers, self.prefill) if each is not None for one in each.adapters.get(name, ())}


@frozen(eq=False)
class Deployment:
    """What all cards make together."""

    answering: Mapping[EndpointId, Answering] = field(factory=dict)
    """The sets that answer, by endpoint."""
    refused: Mapping[EndpointId, str] = field(factory=dict)
    """Why the workers of other endpoints get no requests."""


def deployment_of(cards: Iterable[Announced]) -> Deployment:
    """Return the sets that answer requests, and what is refused."""
    sets: dict[EndpointId, WorkerSet] = {}
    refused: dict[EndpointId, str] = {}
    for endpoint, members in _by_endpoint(cards):
        base = [one for one in members if one.model.suffix is None]
        if not base:
            continue  # adapters alone are no set
        if problem := disagreement(endpoint, base) or _unfit(endpoint, base[0].model.card):
            refused[endpoint] = problem
        else:
            models = tuple(one.model for one in base)
            sets[endpoint] = WorkerSet(endpoint, models, base[0].facts, _adapters(members))
    near: dict[tuple[str, str], list[WorkerSet]] = {}
    for each in sets.values():
        near.setdefault((each.name, each.endpoint.namespace), []).append(each)
    answering: dict[EndpointId, Answering] = {}
    for those in near.values():
        for one in those:
            if one.is_answering:
                answering[one.endpoint] = _answering(one, those, refused)
    return Deployment(answering, refused)


def facts_of(card: ModelDeploymentCard) -> dict[str, Any]:
    """Return by name what the cards of one set must agree in."""
    facts: dict[str, Any] = json.loads(evolve(card, source_path=card.display_name).checksum_content())
    facts |= dict(zip(_FILES, facts.pop("files"), strict=True))
    return facts | {"model_type": card.model_type.to_wire(), "model_input": card.model_input}


def disagreement(endpoint: EndpointId, base: Iterable[Announced]) -> str:
    """Return in what the cards of an endpoint disagree, with the instances; empty if they agree."""
    by_facts: dict[str, list[int]] = {}
    for one in base:
        by_facts.setdefault(one.facts, []).append(one.model.instance_id)
    if len(by_facts) == 1:
        return ""
    groups = sorted(by_facts.items(), key=lambda group: -len(group[1]))
    (usual, most), *others = ((json.loads(facts), ids) for facts, ids in groups)
    texts = []
    for facts, ids in others:
        names = [name for name in {**usual, **facts} if usual.get(name) != facts.get(name)]
        values = ", ".join(f"{name} ({_shown(facts.get(name))}, not {_shown(usual.get(name))})" for name in names)
        texts.append(f"{_ids(ids)} differ from {_ids(most)} in {values}")
    return f"the workers at {endpoint} disagree: " + "; ".join(texts)


def _unfit(endpoint: EndpointId, card: ModelDeploymentCard) -> str:
    """Return why workers with this card get no requests; empty if they may."""
    if not card.display_name.strip():
        return f"the workers at {endpoint} announce a model without a name"
    if card.model_input != "Tokens":
        return f"{card.display_name!r} at {endpoint} takes {card.model_input}, and a front end sends Tokens"
    if card.kv_cache_block_size < 1:
        return f"{card.display_name!r} at {endpoint} has KV blocks of no tokens"
    if not card.tokenizes:
        return ""
    if card.role is not WorkerType.AGGREGATED:
        return f"{card.display_name!r} at {endpoint} is to tokenize as {card.role}: only workers that do both parts can"
    if card.tokenizer is not None or card.byte_level is not None or card.chat_template_file is not None:
        return f"{card.display_name!r} at {endpoint} has its tokenizer or template both at its workers and in its card"
    return ""


def _answering(one: WorkerSet, near: Iterable[WorkerSet], refused: dict[EndpointId, str]) -> Answering:
    """Return the set with those of its model and namespace that it works with; prefill workers that are none for it are
    added to `refused`."""
    prefill: WorkerSet | None = None
    present = {one.role}
    for each in near:
        if each.role is not WorkerType.PREFILL:
            present.add(each.role)
        elif one.role is WorkerType.DECODE and _tokens_of(each) != _tokens_of(one):
            refused[each.endpoint] = (
                f"the workers at {each.endpoint} have another tokenizer than those at {one.endpoint}"
            )
        elif one.role is WorkerType.DECODE and prefill is None:
            prefill = each
            present.add(each.role)
    needs = one.card.needs
    if not needs or any(present.issuperset(those) for those in needs):
        return Answering(one, prefill)
    wanted = " or ".join(" and ".join(those) for those in needs)
    return Answering(one, prefill, f"{one.name!r} at {one.endpoint} needs {wanted} workers, which are not there")


def _tokens_of(one: WorkerSet) -> object:
    """Return what must be equal for the token ids of one set to mean the same in another."""
    tokenizer = one.card.tokenizer
    return None if tokenizer is None else tokenizer.file.checksum, one.card.byte_level is None


def _by_endpoint(cards: Iterable[Announced]) -> list[tuple[EndpointId, list[Announced]]]:
    found: dict[str, list[Announced]] = {}
    for one in sorted(cards, key=lambda one: one.key):
        found.setdefault(one.path, []).append(one)
    return [(members[0].model.endpoint, members) for members in found.values()]


def _adapters(members: Iterable[Announced]) -> dict[str, frozenset[int]]:
    found: dict[str, set[int]] = {}
    for model in (one.model for one in members):
        if model.suffix is not None and (name := _adapter_name(model)).strip():
            found.setdefault(name, set()).add(model.instance_id)
    return {name: frozenset(workers) for name, workers in sorted(found.items())}


def _adapter_name(model: Model) -> str:
    return (model.suffix or "") if model.card.lora is None else model.card.lora.name


def _is_answering(card: ModelDeploymentCard) -> bool:
    return card.role in (WorkerType.AGGREGATED, WorkerType.DECODE) and bool(card.model_type & _TEXT)


def _ids(instance_ids: Sequence[int]) -> str:
    more = len(instance_ids) - _SHOWN_INSTANCES
    shown = ", ".join(f"{one:x}" for one in instance_ids[:_SHOWN_INSTANCES])
    return f"{shown} and {more} more" if more > 0 else shown


def _shown(value: object) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
