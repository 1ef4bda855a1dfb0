"""Model: what text and token stages know of a model: its tokenizer, chat template, stop ids and limits.

ModelFolder: reads what a Model needs from a folder as Hugging Face lays it out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from pipeline import InvalidArgument
from pipeline.errors import CodecError
from pipeline.llm import architectural_context_length, read_object, wrong_file
from pipeline.protocols.card import ByteLevel

from .chat_template import ChatTemplate
from .tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer


class ModelFolder:
    """The files of one model. Every method raises InvalidArgument that names the file and what is wrong with it."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise InvalidArgument(f"{path} is not a model folder: no such directory", field="model_path")
        self._path = path
        self._tokenizer_config = read_object(path / "tokenizer_config.json")

    def tokenizer(self) -> HuggingFaceTokenizer:
        file = "tokenizer.json"
        try:
            return HuggingFaceTokenizer.from_file(self._path / file)
        except FileNotFoundError as error:
            raise self._wrong(file, "is missing") from error
        except (CodecError, UnicodeDecodeError, OSError) as error:
            raise self._wrong(file, f"cannot be read: {error}") from error

    def chat_template(self, now: Callable[[], datetime] | None) -> ChatTemplate | None:
        """The first that exists of chat_template.jinja, chat_template.json, tokenizer_config.json's own."""
        file, found = self._template_source()
        if found is None:
            return None
        named = {"default": found} if isinstance(found, str) else _named_templates(found)
        if "default" not in named:
            raise self._wrong(file, "chat_template must be a text, or a list of names and texts with a default")
        tokens = {key: text for key in ("bos_token", "eos_token") if (text := self._token(key)) is not None}
        try:
            return ChatTemplate(named["default"], tool_source=named.get("tool_use"), tokens=tokens, now=now)
        except CodecError as error:
            raise self._wrong(file, str(error)) from error

    def eos_token_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Those of generation_config.json, else of config.json; then the tokenizer's own."""
        ids: list[int] = []
        for file in ("generation_config.json", "config.json"):
            if (found := read_object(self._path / file).get("eos_token_id")) is not None:
                ids = found if isinstance(found, list) else [found]
                if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
                    raise self._wrong(file, "eos_token_id must be an integer or a list of integers")
                break
        eos_token = self._token("eos_token")
        own = tokenizer.token_id(eos_token) if eos_token is not None else None
        return tuple(dict.fromkeys([*ids, *([] if own is None else [own])]))

    def _template_source(self) -> tuple[str, Any]:
        """The file that holds the template, and what it holds."""
        jinja, separate = "chat_template.jinja", "chat_template.json"
        if (self._path / jinja).is_file():
            try:
                return jinja, (self._path / jinja).read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError) as error:
                raise self._wrong(jinja, f"cannot be read: {error}") from error
        if (found := read_object(self._path / separate).get("chat_template")) is not None:
            return separate, found
        return "tokenizer_config.json", self._tokenizer_config.get("chat_template")

    def _token(self, key: str) -> str | None:
        """Return the text of a special token, which the file has as a string or as an object."""
        token = self._tokenizer_config.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        return token if isinstance(token, str) else None

    def _wrong(self, file: str, problem: str) -> InvalidArgument:
        return wrong_file(self._path / file, problem)


def _named_templates(found: object) -> dict[str, str]:
    """Templates by name, of a list of `{"name", "template"}` or an object of texts; empty for anything else."""
    if isinstance(found, list) and all(isinstance(entry, dict) for entry in found):
        found = {entry.get("name"): entry.get("template") for entry in found}
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        return {}
    return {str(name): text for name, text in found.items()}


LAST_USER_MESSAGE = (
    "{% set said = messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list %}"
    "{{ said[-1] if said else messages[-1].content }}"
)
"""The template of `Model.byte_level`: the prompt is the last user message as it stands.

An engine that echoes its prompt then answers a chat with the user's last message, without markup around it.
"""

WHOLE_CHAT = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A template under which each turn of a chat begins with the one before it, as those of real models do."""


@frozen
class Model:
    """A model as its callers know it; weights are the engine's business."""

    name: str
    tokenizer: Tokenizer = field(repr=False)
    chat_template: ChatTemplate | None = field(default=None, repr=False)
    eos_token_ids: tuple[int, ...] = ()
    """They end an answer unless the request ignores them."""
    context_length: int | None = None
    """Tokens that prompt and answer may have together; None if only the engine knows."""
    reject_prompt_overflow: bool = True
    """Whether a longer prompt is refused here."""
    reject_total_overflow: bool = True
    """Whether a longer sum of both is refused here."""
    checks_token_ids: bool = True
    """Whether a prompt of ids that the tokenizer does not know is refused; False where the engine takes any id."""

    @classmethod
    def from_folder(
        cls, path: Path | str, name: str | None = None, *, now: Callable[[], datetime] | None = None
    ) -> Model:
        """The model in a folder as Hugging Face lays it out; `name` is the folder's unless given.

        Reads tokenizer.json, and where they exist tokenizer_config.json, chat_template.jinja or chat_template.json,
        config.json and generation_config.json. `now` is the time of day for templates that write the date. Raises
        InvalidArgument that names the file and what is wrong with it.
        """
        folder = ModelFolder(path := Path(path))
        tokenizer = folder.tokenizer()
        return cls(
            name=name or path.resolve().name,
            tokenizer=tokenizer,
            chat_template=folder.chat_template(now),
            eos_token_ids=folder.eos_token_ids(tokenizer),
            context_length=architectural_context_length(path),
        )

    def write_folder(self, path: Path) -> None:
        """Write the files from which `from_folder` makes the same model, into an empty folder.

        Raise InvalidArgument for a model whose tokenizer has no file, OSError if they cannot be written.
        """
        if not isinstance(self.tokenizer, HuggingFaceTokenizer):
            raise InvalidArgument(f"the tokenizer of {self.name!r} has no file", field="model_path")
        self.tokenizer.write(path / "tokenizer.json")
        settings: dict[str, Any] = {}
        if (chat := self.chat_template) is not None:
            named = [("default", chat.source), ("tool_use", chat.tool_source)]
            templates = [{"name": name, "template": source} for name, source in named if source is not None]
            settings = {**chat.tokens, "chat_template": templates}
        config = {"eos_token_id": list(self.eos_token_ids), "max_position_embeddings": self.context_length or 0}
        for name, content in (("tokenizer_config.json", settings), ("config.json", config)):
            (path / name).write_text(json.dumps(content), encoding="utf-8")

    def with_chat_template(self, path: Path) -> Model:
        """The same model with the chat template in a file; names such as `bos_token` stay those of its own.

        Raises InvalidArgument for a file that cannot be read or is no template.
        """
        try:
            source = path.read_text(encoding="utf-8")
            own = self.chat_template
            template = ChatTemplate(source) if own is None else own.with_source(source)
        except (OSError, UnicodeDecodeError, CodecError) as error:
            raise InvalidArgument(f"{path}: {error}", field="custom_jinja_template") from error
        return evolve(self, chat_template=template)

    @property
    def byte_level_parts(self) -> ByteLevel | None:
        """What `byte_level` would need to make the same model elsewhere; None for a model that has files."""
        if not isinstance(self.tokenizer, ByteTokenizer) or self.chat_template is None:
            return None
        return ByteLevel(self.chat_template.source, self.checks_token_ids)

    @classmethod
    def byte_level(
        cls, name: str = "echo", *, context_length: int | None = None, chat_template: str = LAST_USER_MESSAGE
    ) -> Model:
        """Return a model of bytes, which needs no files. By default the prompt of a chat is its last user message."""
        return cls(
            name=name,
            tokenizer=ByteTokenizer(),
            chat_template=ChatTemplate(chat_template),
            eos_token_ids=(ByteTokenizer.eos_token_id,),
            context_length=context_length,
        )
