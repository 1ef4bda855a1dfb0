"""The JSON schemas of wire records, from the declarations that the codec uses.

schemas = Schemas("read")
schemas.of(ChatCompletionRequest)   ──►  {"$ref": "#/components/schemas/ChatCompletionRequest"}
schemas.components                  ──►  every record met so far, by name
"""

from __future__ import annotations

import types
from collections.abc import Collection, Mapping
from typing import Any, Literal, Union, get_args, get_origin

import attrs
from attrs import define, field

from pipeline.protocols.field_rules import WIRE_KEY, IntRange, WireRule

Schema = dict[str, Any]

_PLACE = "#/components/schemas/"
_PLAIN: Mapping[Any, Schema] = {
    Any: {},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    type(None): {"type": "null"},
}


@define
class Schemas:
    """Collects the schemas of records and of all that they hold."""

    mode: Literal["read", "write"]
    """A record to read requires its fields without a default; a written record has its fields that are always there."""
    keywords: Mapping[type[Any], Mapping[str, Mapping[str, object]]] = field(factory=dict)
    """Additions to the fields of a record, by its class."""
    taken: Collection[str] = ()
    """Names in use: a record with one of them gets `Answer` behind its own."""
    components: dict[str, Schema] = field(factory=dict)
    """The schemas of all records so far, by name."""

    def of(self, kind: Any) -> Schema:
        """Return the schema of a type: a record by reference, any other in full."""
        if _is_plain(kind):
            return dict(_PLAIN[kind])
        for mark in getattr(kind, "__metadata__", ()):
            if isinstance(mark, IntRange):
                return {"type": "integer", "minimum": mark.low, "maximum": mark.high}
        if hasattr(kind, "from_wire"):
            return {}
        if attrs.has(kind):
            return self._reference(kind)
        return self._composed(get_origin(kind) or kind, get_args(kind))

    def _composed(self, origin: Any, parts: tuple[Any, ...]) -> Schema:
        if origin is Literal:
            return {"type": "string", "enum": list(parts)}
        if origin in (Union, types.UnionType):
            return _either([self.of(part) for part in parts])
        if origin in (list, set):
            return {"type": "array", "items": self.of(parts[0] if parts else Any)}
        if origin is dict:
            return {"type": "object", "additionalProperties": self.of(parts[1] if parts else Any)}
        raise TypeError(f"a field of type {origin} has no JSON schema here")

    def _reference(self, cls: type[Any]) -> Schema:
        name = f"{cls.__name__}Answer" if cls.__name__ in self.taken else cls.__name__
        if name not in self.components:
            self.components[name] = {}  # a record may hold records of its own kind
            self.components[name] = self._record(cls)
        return {"$ref": _PLACE + name}

    def _record(self, cls: type[Any]) -> Schema:
        attrs.resolve_types(cls)
        properties: dict[str, Schema] = {}
        required: list[str] = []
        whole: Schema = {"additionalProperties": False} if getattr(cls, "wire_closed", False) else {}
        whole |= getattr(cls, "wire_needs", {})
        for attribute in attrs.fields(cls):
            rule: WireRule = attribute.metadata.get(WIRE_KEY) or WireRule(
                "set" if attribute.default is None else "always"
            )
            added = self.keywords.get(cls, {}).get(attribute.name, {})
            if rule.write == "rest":
                whole |= added
            if rule.write in ("never", "rest"):
                continue
            name = rule.name or attribute.name
            properties[name] = {**self.of(attribute.type), **added}
            properties |= {alias: properties[name] for alias in rule.aliases if self.mode == "read"}
            if attribute.default is attrs.NOTHING or (self.mode == "write" and rule.write == "always"):
                required.append(name)
        about = (cls.__doc__ or "").strip().partition("\n")[0]
        schema: Schema = {"type": "object", "description": about, "properties": properties}
        if required:
            schema["required"] = required
        return schema | whole if self.mode == "read" else schema


def _is_plain(kind: Any) -> bool:
    try:
        return kind in _PLAIN
    except TypeError:  # a type without a hash is not among them
        return False


def _either(schemas: list[Schema]) -> Schema:
    """Return the schema of a union; a single type that may be null keeps its form."""
    null = _PLAIN[type(None)]
    others = [schema for schema in schemas if schema != null]
    if len(others) == len(schemas):
        return {"anyOf": others}
    if len(others) == 1 and isinstance(others[0].get("type"), str):
        nullable = {**others[0], "type": [others[0]["type"], "null"]}
        if "enum" in nullable:
            nullable["enum"] = [*nullable["enum"], None]
        return nullable
    return {"anyOf": [*others, dict(null)]}
