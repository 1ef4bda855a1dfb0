"""Tagged unions of records: which record a plain value stands for, by `protocols.field_rules.Tagged`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
from attrs import evolve

from ..protocols.field_rules import InvalidRecord, Tagged
from .decoders import Decode, decode_at, mismatch

RecordDecoder = Callable[[type], Decode]
RecordEncoder = Callable[[type], Callable[[Any], Any]]


def tagged(kind: Any) -> Tagged | None:
    """Return the rule of a marked union, or of a class by its base: of that only the records below the class."""
    for mark in getattr(kind, "__metadata__", ()):
        if isinstance(mark, Tagged):
            return mark
    rule = getattr(kind, "wire_union", None) if isinstance(kind, type) else None
    if not isinstance(rule, Tagged):
        return None
    return evolve(rule, kinds={tag: record for tag, record in rule.kinds.items() if issubclass(record, kind)})


def tagged_decoder(kind: Any, record_decoder: RecordDecoder) -> Decode:
    """Return the reader of a union. It raises InvalidRecord for a value with no tag, or with another one."""
    rule = tagged(kind)
    assert rule is not None, "called for tagged types only"
    decoders = {tag: record_decoder(record) for tag, record in rule.kinds.items()}
    return _external_decoder(rule, decoders) if rule.key is None else _internal_decoder(rule.key, decoders)


def _internal_decoder(key: str, decoders: Mapping[str, Decode]) -> Decode:
    expected = f"expected one of {', '.join(decoders)}"

    def decode(value: Any, _: Any) -> Any:
        if type(value) is not dict:
            raise mismatch("an object", value)
        tag = value.get(key)
        decoder = decoders.get(tag) if type(tag) is str else None
        if decoder is None:
            raise InvalidRecord(expected, key)
        return decoder(value, None)

    return decode


def _external_decoder(rule: Tagged, decoders: Mapping[str, Decode]) -> Decode:
    without_fields = {tag: record for tag, record in rule.kinds.items() if not attrs.fields(record)}
    with_fields = {tag: decoder for tag, decoder in decoders.items() if tag not in without_fields}
    texts = [f"the text {' or '.join(without_fields)}"] if without_fields else []
    objects = [f"an object with the one key {' or '.join(with_fields)}"] if with_fields else []
    expected = f"expected {', or '.join(objects + texts)}"

    def decode(value: Any, _: Any) -> Any:
        if type(value) is dict and len(value) == 1:
            ((tag, content),) = value.items()
            if (decoder := with_fields.get(tag)) is not None:
                return decode_at(tag, decoder, content, None)
        elif type(value) is str and (record := without_fields.get(value)) is not None:
            return record()
        raise InvalidRecord(expected)

    return decode


def tagged_encoder(kind: Any, record_encoder: RecordEncoder) -> Callable[[Any], Any]:
    """Return the writer of a union's records."""
    rule = tagged(kind)
    assert rule is not None, "called for tagged types only"
    key = rule.key
    encoders = {record: (tag, record_encoder(record)) for tag, record in rule.kinds.items()}
    without_fields = {record for record in encoders if not attrs.fields(record)} if key is None else set[type]()

    def encode(record: Any) -> Any:
        kind = type(record)
        tag, encoder = encoders[kind]
        if key is not None:
            return {key: tag} | encoder(record)
        return tag if kind in without_fields else {tag: encoder(record)}

    return encode
