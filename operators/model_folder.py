"""ModelFolder: reads what a Model needs from a folder as Hugging Face lays it out."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeline import CodecError, InvalidArgument
from pipeline.model_folder import architectural_context_length, read_object, wrong_file

from .chat_template import ChatTemplate
from .tokenizer import HuggingFaceTokenizer, Tokenizer


class ModelFolder:
    """The files of one model. Every method raises InvalidArgument that names the file and what is wrong with it."""

    def __init__(self, path: Path, now: Callable[[], datetime] | None = None) -> None:
        if not path.is_dir():
            raise InvalidArgument(f"{path} is not a model folder: no such directory", field="model_path")
        self._path = path
        self._now = now
        self._tokenizer_config = read_object(path / "tokenizer_config.json")
        self._config = read_object(path / "config.json")
        self._generation_config = read_object(path / "generation_config.json")

    @property
    def name(self) -> str:
        return self._path.resolve().name

    def tokenizer(self) -> HuggingFaceTokenizer:
        file = "tokenizer.json"
        try:
            return HuggingFaceTokenizer.from_file(self._path / file)
        except FileNotFoundError as error:
            raise self._wrong(file, "is missing") from error
        except (CodecError, UnicodeDecodeError, OSError) as error:
            raise self._wrong(file, f"cannot be read: {error}") from error

    def chat_template(self) -> ChatTemplate | None:
        """The first that exists of chat_template.jinja, chat_template.json, tokenizer_config.json's own."""
        file, found = self._template_source()
        if found is None:
            return None
        named = {"default": found} if isinstance(found, str) else _named_templates(found)
        if "default" not in named:
            raise self._wrong(file, "chat_template must be a text, or a list of names and texts with a default")
        tokens = {key: text for key in ("bos_token", "eos_token") if (text := self._token(key)) is not None}
        try:
            return ChatTemplate(named["default"], tool_source=named.get("tool_use"), tokens=tokens, now=self._now)
        except CodecError as error:
            raise self._wrong(file, str(error)) from error

    def eos_token_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Those of generation_config.json, else of config.json; then the tokenizer's own."""
        ids: list[int] = []
        for file, config in (("generation_config.json", self._generation_config), ("config.json", self._config)):
            if (found := config.get("eos_token_id")) is not None:
                ids = found if isinstance(found, list) else [found]
                if not all(_is_integer(token_id) and token_id >= 0 for token_id in ids):
                    raise self._wrong(file, "eos_token_id must be an integer or a list of integers")
                break
        spelled = self._token("eos_token")
        own = tokenizer.token_id(spelled) if spelled is not None else None
        return tuple(dict.fromkeys([*ids, *([] if own is None else [own])]))

    def context_length(self) -> int | None:
        """How many tokens the model's own files say it takes."""
        return architectural_context_length(self._path)

    def _template_source(self) -> tuple[str, Any]:
        """The file that holds the template, and what it holds."""
        jinja = "chat_template.jinja"
        if (self._path / jinja).is_file():
            return jinja, self._text(jinja)
        separate = "chat_template.json"
        if (found := read_object(self._path / separate).get("chat_template")) is not None:
            return separate, found
        return "tokenizer_config.json", self._tokenizer_config.get("chat_template")

    def _token(self, key: str) -> str | None:
        """The spelling of a special token, which is a text or an object that holds it."""
        token = self._tokenizer_config.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        return token if isinstance(token, str) else None

    def _text(self, file: str) -> str:
        try:
            return (self._path / file).read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError) as error:
            raise self._wrong(file, f"cannot be read: {error}") from error

    def _wrong(self, file: str, problem: str) -> InvalidArgument:
        return wrong_file(self._path / file, problem)


def _named_templates(found: object) -> dict[str, str]:
    """Templates by name, of a list of `{"name", "template"}` or an object of texts; empty for anything else."""
    if isinstance(found, list) and all(isinstance(entry, dict) for entry in found):
        found = {entry.get("name"): entry.get("template") for entry in found}
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        return {}
    return {str(name): text for name, text in found.items()}


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
