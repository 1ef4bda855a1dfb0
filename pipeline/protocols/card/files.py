"""The files a model card names: each with its checksum, and what it is.

Source: dynamo lib/llm/src/common/checked_file.rs and lib/llm/src/model_card.rs.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Self

from attrs import frozen

from ..field_rules import InvalidRecord

_CHECKSUM = re.compile(r"blake3:[0-9a-f]{64}")


@frozen
class CheckedFile:
    """A file by path or URL and the checksum of its content. Raises InvalidRecord for a checksum of another shape."""

    path: str
    checksum: str
    size: int | None = None

    def __attrs_post_init__(self) -> None:
        if not _CHECKSUM.fullmatch(self.checksum):
            raise InvalidRecord("expected blake3: and 64 lower-case hex digits", "checksum")

    def to_wire(self) -> dict[str, Any]:
        plain: dict[str, Any] = {"path": self.path, "checksum": self.checksum}
        return plain if self.size is None else plain | {"size": self.size}

    @classmethod
    def from_wire(cls, value: Any) -> CheckedFile:
        """Raise InvalidRecord for anything but an object of path, checksum and, if it is given, size."""
        if not isinstance(value, dict):
            raise InvalidRecord("expected an object with path and checksum")
        for name in ("path", "checksum"):
            if not isinstance(value.get(name), str):
                raise InvalidRecord("expected a string", name)
        size = value.get("size")
        if size is not None and (type(size) is not int or size < 0):
            raise InvalidRecord("expected a number of bytes", "size")
        return cls(value["path"], value["checksum"], size)


@frozen
class TaggedFile:
    """A file and its kind: on the wire an object with the kind as its one key. Subclasses list the valid kinds.

    `is_custom` goes with kinds in `nested_kinds` only, whose file is one level deeper.
    """

    kinds: ClassVar[tuple[str, ...]] = ()
    nested_kinds: ClassVar[tuple[str, ...]] = ()
    kind_aliases: ClassVar[dict[str, str]] = {}

    kind: str
    file: CheckedFile
    is_custom: bool = False

    def __attrs_post_init__(self) -> None:
        if self.kind not in self.kinds:
            raise InvalidRecord("expected one of the kinds " + ", ".join(self.kinds))

    def to_wire(self) -> dict[str, Any]:
        if self.kind in self.nested_kinds:
            return {self.kind: {"is_custom": self.is_custom, "file": self.file.to_wire()}}
        return {self.kind: self.file.to_wire()}

    @classmethod
    def from_wire(cls, value: Any) -> Self:
        """Raise InvalidRecord for anything but one known kind with its file."""
        if not isinstance(value, dict) or len(value) != 1:
            raise InvalidRecord("expected an object with one of the keys " + ", ".join(cls.kinds))
        ((key, content),) = value.items()
        kind = cls.kind_aliases.get(key, str(key))
        if kind not in cls.nested_kinds:
            return cls(kind, _file_at(content, str(key)))
        if not isinstance(content, dict) or type(content.get("is_custom")) is not bool:
            raise InvalidRecord("expected an object with is_custom and file", str(key))
        return cls(kind, _file_at(content.get("file"), f"{key}.file"), content["is_custom"])


def _file_at(value: Any, place: str) -> CheckedFile:
    """Return the file in a wire value. Errors carry its place."""
    try:
        return CheckedFile.from_wire(value)
    except InvalidRecord as error:
        raise InvalidRecord(error.message, f"{place}.{error.field}".rstrip(".")) from None


class ModelInfoFile(TaggedFile):
    """The model's configuration."""

    kinds = ("hf_config_json",)


class TokenizerFile(TaggedFile):
    """The tokenizer."""

    kinds = ("hf_tokenizer_json", "tik_token_model")


class PromptFormatterFile(TaggedFile):
    """The chat template, alone or inside a tokenizer configuration."""

    kinds = ("hf_tokenizer_config_json", "hf_chat_template", "hf_chat_template_json")
    nested_kinds = ("hf_chat_template", "hf_chat_template_json")
    kind_aliases: ClassVar[dict[str, str]] = {"hf_chat_template_jinja": "hf_chat_template"}


class GenerationConfigFile(TaggedFile):
    """The model's own generation defaults."""

    kinds = ("hf_generation_config_json",)
