"""RequestLimits: how much one request may hold, whatever carries it."""

from __future__ import annotations

from attrs import frozen

from .settings import setting


@frozen
class RequestLimits:
    """Bounds on the parts of one chat or completion request; 0 turns a bound off.

    A request beyond one of them is refused before its prompt is rendered or tokenized.
    """

    max_tools: int = setting(1536, "Tools that a chat may declare.")
    max_messages: int = setting(4_096, "Messages of a chat.")
    max_content_parts: int = setting(16_384, "Parts of the contents of all messages.")
    max_prompt_characters: int = setting(8_388_608, "Characters in the prompt, or in the texts of all messages.")
    max_token_ids: int = setting(1_048_576, "Token ids in all fields of a request.")
    max_logit_bias_entries: int = setting(4_096, "Tokens that `logit_bias` may name.")
    max_field_entries: int = setting(
        4_096, "Entries in one of the other lists and objects: `metadata`, `guided_choice`, `nvext.annotations`, ..."
    )
