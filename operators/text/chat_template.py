"""Chat templates: messages to the prompt's text, as Hugging Face renders them. The one door of jinja2.

Source: dynamo lib/llm/src/preprocessor/prompt/template/oai.rs. Other than there, templates run in jinja2 itself, in
its sandbox, so whatever a model brings behaves as it does in its own repository.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any

from pipeline import InvalidArgument
from pipeline.errors import CodecError

from .request_size import json_characters

if TYPE_CHECKING:
    from jinja2 import Environment, Template

Message = dict[str, Any]
"""A message as plain values; `content` is a text or a list of parts."""


_JSON_AT_ONCE_CHARACTERS = 65_536
"""What is longer is written in steps, between which other threads run."""


def never() -> None:
    """For work that is never given up."""


class _RefusedByTemplate(Exception):
    """`raise_exception` was called in a template."""


class ChatTemplate:
    """A compiled template. `tool_source`, if there is one, is used for chats with tools.

    `tokens` are named texts for the template (`bos_token`, `eos_token`). `now` is the time of day for templates that
    write the date; without it `strftime_now` is not defined there. Raises CodecError if a source is no template.
    """

    def __init__(
        self,
        source: str,
        *,
        tool_source: str | None = None,
        tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] | None = None,
    ) -> None:
        self.source, self.tool_source = source, tool_source
        self.tokens = dict(tokens or {})
        self._template = _compile(source)
        self._tool_template = self._template if tool_source is None else _compile(tool_source)
        self._names: dict[str, Any] = {"bos_token": "", "eos_token": "", **(tokens or {}), "raise_exception": _refuse}
        if now is not None:
            self._names["strftime_now"] = lambda form: now().strftime(form)
        self._wants_parts = self._takes(_PROBE_PARTS) and not self._takes(_PROBE_TEXT)

    def with_source(self, source: str) -> ChatTemplate:
        """Another template with the same names. Raises CodecError if the source is none."""
        other = ChatTemplate(source)
        other.tokens, other._names = self.tokens, self._names
        return other

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        args: Mapping[str, Any] | None = None,
        give_up: Callable[[], None] = never,
    ) -> str:
        """The prompt; `args` are further names for the template. `give_up` is called again and again, and may raise.

        Raises InvalidArgument for a name in `args` that the template has already, and with the template's own words if
        it refuses the messages; CodecError if it fails.
        """
        template = self._tool_template if tools else self._template
        chat = {
            "messages": [self._shaped(message) for message in messages],
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        given = args or {}
        for name in given:
            if name in chat or name in self._names or name in _OPTIONAL_NAMES or name in template.globals:
                field = f"chat_template_args.{name}"
                raise InvalidArgument(f"{field} would replace a name that the chat template has already", field=field)
        try:
            if give_up is never:
                return template.render({**given, **self._names, **chat})
            pieces = []
            for piece in template.generate({**given, **self._names, **chat}):
                pieces.append(piece)
                give_up()
            return "".join(pieces)
        except _RefusedByTemplate as refusal:
            raise InvalidArgument(str(refusal), field="messages") from refusal
        except Exception as error:  # whatever the template's own expressions raise
            raise CodecError("the chat template failed on these messages") from error

    def _shaped(self, message: Message) -> Message:
        """The message with its content in the form this template reads: one text, or parts."""
        content = message.get("content")
        if isinstance(content, str) and self._wants_parts:
            return {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content, list) and not self._wants_parts and all(part["type"] == "text" for part in content):
            return {**message, "content": "\n".join(part["text"] for part in content)}
        return message

    def _takes(self, content: object) -> bool:
        """Whether content of this form shows up in the prompt."""
        message = {"role": "user", "content": content}
        try:
            return _PROBE_TEXT in self._template.render({**self._names, "messages": [message]})
        except Exception:  # a template may dislike the form, or a chat this short
            return False


_OPTIONAL_NAMES = frozenset({"strftime_now"})
"""Names that are the server's even where it does not define them: templates look whether they are there."""
_PROBE_TEXT = "content-probe"
_PROBE_PARTS = [{"type": "text", "text": _PROBE_TEXT}]


def _compile(source: str) -> Template:
    from jinja2 import TemplateSyntaxError

    try:
        template = _environment().from_string(source)
    except TemplateSyntaxError as error:
        raise CodecError(f"not a chat template: line {error.lineno}: {error.message}") from error
    template.globals = dict(template.globals)  # each rendering copies the names: of a ChainMap that takes 5 us more
    return template


@cache
def _environment() -> Environment:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's part for training; here it is its content."""

        tags = {"generation"}  # noqa: RUF012  # as the library declares it

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as a model sees it: the library's own filter would escape it for HTML."""
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if json_characters(value, _JSON_AT_ONCE_CHARACTERS) <= _JSON_AT_ONCE_CHARACTERS:
        return encoder.encode(value)
    return "".join(encoder.iterencode(value))


def _refuse(message: str) -> None:
    raise _RefusedByTemplate(message)
