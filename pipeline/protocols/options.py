"""Options of a request to the engine: when to stop, how to sample, what to return.

Source: dynamo lib/llm/src/protocols/common.rs, StopConditions, SamplingOptions, GuidedDecodingOptions, OutputOptions.
"""

from __future__ import annotations

from typing import Any

from attrs import define

from .field_rules import I32, I64, U8, U32, InvalidRecord, null

MAX_GRAMMAR_NESTING = 500
"""Bracket depth above which a grammar is refused: grammar compilers recurse once per level."""


@define(slots=True)
class StopConditions:
    """When generation ends."""

    max_tokens: U32 | None = null()
    stop: list[str] | None = null()
    """Stop strings of the client."""
    stop_token_ids: list[U32] | None = null()
    """Stop ids of the client; not part of the text."""
    stop_token_ids_visible: list[U32] | None = null()
    """Stop ids whose text is kept."""
    stop_token_ids_hidden: list[U32] | None = null()
    """Stop ids of the model; not part of the text."""
    min_tokens: U32 | None = null()
    """Tokens before which generation does not stop."""
    ignore_eos: bool | None = null()
    """Whether end-of-sequence ids are ignored."""
    max_thinking_tokens: U32 | None = null()
    """Limit of the reasoning part."""

    def apply_ignore_eos(self) -> None:
        """Drop every stop string and stop id if `ignore_eos` is set; all else stays."""
        if self.ignore_eos:
            self.stop = None
            self.stop_token_ids = self.stop_token_ids_visible = self.stop_token_ids_hidden = None


@define(slots=True)
class GuidedDecodingOptions:
    """A form the output must have: at most one of the kinds, with an optional engine `backend`.

    Raises InvalidRecord for two kinds together, or a grammar nested deeper than `MAX_GRAMMAR_NESTING`.
    """

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    backend: str | None = None
    whitespace_pattern: str | None = None
    structural_tag: Any = None

    def __attrs_post_init__(self) -> None:
        kinds = self.kinds()
        if len(kinds) > 1:
            raise InvalidRecord(f"only one kind of guided decoding may be given, found {', '.join(kinds)}")
        if self.grammar is not None and bracket_depth(self.grammar) > MAX_GRAMMAR_NESTING:
            raise InvalidRecord(f"brackets are nested deeper than {MAX_GRAMMAR_NESTING} levels", "grammar")

    def kinds(self) -> list[str]:
        """Return the names of the kinds that are set; an empty `choice` is not."""
        names = ("json", "regex", "grammar", "whitespace_pattern", "structural_tag")
        return [name for name in names if getattr(self, name) is not None] + (["choice"] if self.choice else [])

    @classmethod
    def from_optional(
        cls,
        *,
        json: Any = None,
        regex: str | None = None,
        choice: list[str] | None = None,
        grammar: str | None = None,
        backend: str | None = None,
        whitespace_pattern: str | None = None,
        structural_tag: Any = None,
    ) -> GuidedDecodingOptions | None:
        """Return the options, or None if no kind is set; a backend alone selects nothing."""
        kinds = json, regex, grammar, whitespace_pattern, structural_tag
        if not choice and kinds.count(None) == len(kinds):
            return None
        return cls(json, regex, choice or None, grammar, backend, whitespace_pattern, structural_tag)


def bracket_depth(text: str) -> int:
    """Return the deepest nesting of round, square and curly brackets, wherever they stand."""
    depth = deepest = 0
    for byte in text.encode("utf-8", "surrogatepass"):
        if byte in b"([{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b")]}" and depth:
            depth -= 1
    return deepest


@define(slots=True)
class SamplingOptions:
    """How the next token is drawn. None: the engine's default."""

    n: U8 | None = null()
    """Number of choices."""
    best_of: U8 | None = null()
    """Choices to generate, of which the best `n` are returned."""
    presence_penalty: float | None = null()
    frequency_penalty: float | None = null()
    repetition_penalty: float | None = null()
    temperature: float | None = null()
    top_p: float | None = null()
    top_k: I32 | None = null()
    min_p: float | None = null()
    use_beam_search: bool | None = null()
    length_penalty: float | None = null()
    seed: I64 | None = null()
    """Seed of the random draws."""
    include_stop_str_in_output: bool | None = null()
    """Whether the stop string is part of the text."""
    guided_decoding: GuidedDecodingOptions | None = null()
    """A form the output must have."""

    def force_greedy(self) -> None:
        """Drop everything that would make the draw other than the most likely token."""
        self.presence_penalty = self.frequency_penalty = self.repetition_penalty = None
        self.temperature = self.top_p = self.top_k = self.min_p = None


@define(slots=True)
class OutputOptions:
    """What is returned beside the tokens."""

    logprobs: U32 | None = null()
    """Candidates per generated token, with log probabilities."""
    prompt_logprobs: U32 | None = null()
    """Candidates per prompt token."""
    skip_special_tokens: bool | None = null()
    """Whether special tokens are omitted from the text."""
    formatted_prompt: bool | None = null()
    """Whether the prompt's text is returned."""
    return_tokens_as_token_ids: bool | None = null()
    """Whether tokens are returned as `token_id:<id>`."""
