"""Model: what text and token stages know of a model: its tokenizer, chat template, stop ids and limits."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from attrs import evolve, field, frozen

from pipeline import CodecError, InvalidArgument

from .byte_tokenizer import ByteTokenizer
from .chat_template import ChatTemplate
from .model_folder import ModelFolder
from .tokenizer import Tokenizer

LAST_USER_MESSAGE = (
    "{% set said = messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list %}"
    "{{ said[-1] if said else messages[-1].content }}"
)
"""The template of `Model.byte_level`: the prompt is the last user message as it stands.

An engine that echoes its prompt so answers a chat with what the user just said, without any markup around it.
"""

WHOLE_CHAT = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A template under which each turn of a chat begins with the one before it, as those of real models do."""


@frozen
class Model:
    """A model as its callers know it; weights are the engine's business.

    `eos_token_ids` end an answer unless the request ignores them. `context_length` is how many tokens
    prompt and answer may have together, None if only the engine knows; the two flags say whether it is enforced here.
    `checks_token_ids`: whether a prompt in token ids that the tokenizer does not know is refused; False where the
    engine takes any id, whatever the tokenizer is.
    """

    name: str
    tokenizer: Tokenizer = field(repr=False)
    chat_template: ChatTemplate | None = field(default=None, repr=False)
    eos_token_ids: tuple[int, ...] = ()
    context_length: int | None = None
    reject_prompt_overflow: bool = True
    reject_total_overflow: bool = True
    checks_token_ids: bool = True

    @classmethod
    def from_folder(
        cls, path: Path | str, name: str | None = None, *, now: Callable[[], datetime] | None = None
    ) -> Model:
        """The model in a folder as Hugging Face lays it out; `name` is the folder's unless given.

        Reads tokenizer.json, and where they exist tokenizer_config.json, chat_template.jinja or chat_template.json,
        config.json and generation_config.json. `now` is the time of day for templates that write the date. Raises
        InvalidArgument that names the file and what is wrong with it.
        """
        folder = ModelFolder(Path(path), now)
        tokenizer = folder.tokenizer()
        return cls(
            name=name or folder.name,
            tokenizer=tokenizer,
            chat_template=folder.chat_template(),
            eos_token_ids=folder.eos_token_ids(tokenizer),
            context_length=folder.context_length(),
        )

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

    @classmethod
    def byte_level(
        cls, name: str = "echo", *, context_length: int | None = None, chat_template: str = LAST_USER_MESSAGE
    ) -> Model:
        """A model of bytes: needs no files; its prompt for a chat is the last user message unless told otherwise."""
        return cls(
            name=name,
            tokenizer=ByteTokenizer(),
            chat_template=ChatTemplate(chat_template),
            eos_token_ids=(ByteTokenizer.eos_token_id,),
            context_length=context_length,
        )
