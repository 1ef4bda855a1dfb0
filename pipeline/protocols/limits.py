"""Limits of a graph.

RequestLimits: what one request may hold. PromptWork: how prompts are prepared. BusyThresholds: when a worker is busy.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from attrs import asdict, evolve, frozen

from pipeline.settings import at_least, finite, number, setting, share, whole


@frozen
class RequestLimits:
    """Bounds on the parts of one chat or completion request; 0 turns a bound off.

    A request beyond one of them is refused before its prompt is rendered or tokenized.
    """

    group: ClassVar[str] = "Limits"

    max_tools: int = setting(1536, "Tools that a chat may declare.")
    max_messages: int = setting(4_096, "Messages of a chat.")
    max_content_parts: int = setting(16_384, "Parts of the contents of all messages.")
    max_prompt_characters: int = setting(8_388_608, "Characters in the prompt, or in the texts of all messages.")
    max_token_ids: int = setting(1_048_576, "Token ids in all fields of a request.")
    max_logit_bias_entries: int = setting(4_096, "Tokens that `logit_bias` may name.")
    max_field_entries: int = setting(
        4_096, "Entries in one of the other lists and objects: `metadata`, `guided_choice`, `nvext.annotations`, ..."
    )
    max_stop_characters: int = setting(1_024, "Characters in one stop string.")
    max_tool_call_characters: int = setting(262_144, "Characters in the arguments of one tool call of a chat.")
    max_unbroken_characters: int = setting(
        262_144, "Characters in a row of a prompt that the tokenizer cannot cut, as a word without an end."
    )
    max_prompt_tokens: int = setting(2_097_152, "Tokens that the text of a prompt may become.")


@frozen
class PromptWork:
    """How the prompts of all requests are rendered, tokenized and hashed: the short ones at once, others in threads."""

    group: ClassVar[str] = "Limits"

    inline_prompt_characters: int = setting(
        8_192, "Characters, or token ids, up to which a prompt is prepared at once; a longer one is in a thread."
    )
    tokenizer_threads: int = setting(2, "Threads that prepare long prompts.", at_least(1))
    max_waiting_prompts: int = setting(
        2_048, "Long prompts that may wait for such a thread; more are refused as an overload."
    )


_threshold = partial(setting, None, metavar="FRACTION", is_read_below=True)


@frozen
class BusyThresholds:
    """Above which a rank of a worker is busy; None switches a test off. Raise InvalidArgument for one out of range."""

    group: ClassVar[str] = "Graph"
    variable_prefix: ClassVar[str] = "DYN_"

    active_decode_blocks_threshold: float | None = _threshold(
        "A worker is busy with more than this part of its KV blocks in use or in decode.", share(), read=number(0, 1)
    )
    active_prefill_tokens_threshold: int | None = _threshold(
        "A worker is busy with more tokens than this in prefill.", finite(0), metavar="TOKENS", read=whole()
    )
    active_prefill_tokens_threshold_frac: float | None = _threshold(
        "The same as a part of the tokens of its largest batch.", finite(0), read=number()
    )

    def updated(self, changed: BusyThresholds) -> BusyThresholds:
        """Return these thresholds with those that are set in `changed`."""
        return evolve(self, **{name: value for name, value in asdict(changed).items() if value is not None})
