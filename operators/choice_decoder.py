"""ChoiceDecoder: the tokens of one choice to its text, up to where it stops. Pure.

    token ids ──► incremental text ──► stop ids ──► stop strings ──► visible text, finish reason

Source: dynamo lib/llm/src/backend.rs, Decoder; see `StopMatcher` for what is different.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from pipeline import CodecError
from pipeline.protocols import FinishReason, PreprocessedRequest

from .stop_matcher import StopMatcher
from .text_decoder import TextDecoder

_NO_IDS: frozenset[int] = frozenset()


@frozen
class StopRules:
    """What ends the choices of a request before the engine does. The model's own ids end it without a stop reason."""

    min_tokens: int = 0
    visible_ids: frozenset[int] = frozenset()
    hidden_ids: frozenset[int] = frozenset()
    model_ids: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()
    include_stop: bool = False

    @classmethod
    def of(cls, request: PreprocessedRequest) -> StopRules:
        """The rules a request asks for."""
        conditions = request.stop_conditions
        model_ids = frozenset([*(conditions.stop_token_ids_hidden or ()), *request.eos_token_ids])
        hidden_ids = frozenset([*(conditions.stop_token_ids or ()), *(conditions.stop_token_ids_hidden or ())])
        # A set takes 216 bytes for as long as the request is open. Most have no ids of their own.
        return cls(
            min_tokens=conditions.min_tokens or 0,
            visible_ids=frozenset(conditions.stop_token_ids_visible or ()) or _NO_IDS,
            hidden_ids=hidden_ids or _NO_IDS,
            model_ids=(hidden_ids if model_ids == hidden_ids else model_ids) or _NO_IDS,
            stops=tuple(conditions.stop or ()),
            include_stop=bool(request.sampling_options.include_stop_str_in_output),
        )


class ChoiceDecoder:
    """The state of one choice. `finish` and `stop_reason` are set once a rule of ours has ended it.

    Tokens before the `min_tokens`-th are not looked at. A visible stop id ends the choice with its text, a hidden one
    without; ids count before strings. A token that cannot be decoded ends it with an error.
    """

    __slots__ = ("_count", "_decoder", "_matcher", "_min_tokens", "_rules", "_stop_ids", "finish", "stop_reason")

    def __init__(self, decoder: TextDecoder, rules: StopRules) -> None:
        self._decoder = decoder
        self._rules = rules
        self._min_tokens = rules.min_tokens
        self._stop_ids = rules.visible_ids | rules.hidden_ids if rules.visible_ids else rules.hidden_ids
        self._matcher = StopMatcher(rules.stops, include=rules.include_stop) if rules.stops else None
        self._count = 0
        self.finish: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def feed(self, token_ids: Sequence[int], tokens: list[str | None]) -> str:
        """The text that may be shown after these tokens.

        Appends the text of each token to `tokens`, None if it has none to show, up to the one that ends the choice.
        """
        shown = ""
        for token_id in token_ids:
            self._count += 1
            is_checked = self._count >= self._min_tokens
            try:
                if is_checked and token_id in self._stop_ids:
                    return shown + self._stop_at(token_id, tokens)
                text = self._decoder.step(token_id)
            except CodecError as error:
                tokens.append(None)
                return shown + self._fail(error)
            tokens.append(text or None)
            if is_checked and self._matcher is not None:
                held = self._matcher.held
                text = self._matcher.feed(text)
                if self._is_matched(self._matcher):
                    tokens[-1] = text[len(held) :] or None
                    return shown + text
            shown += text
        return shown

    def resume(self, held: str) -> None:
        """Takes over text that another decoder of this choice held back when its engine failed."""
        if self._matcher is not None:
            self._matcher.resume(held)

    def release(self) -> str:
        """Gives up the text that was held back for a stop string; one may be found in it."""
        if self._matcher is None:
            return ""
        text = self._matcher.flush()
        self._is_matched(self._matcher)
        return text

    def flush(self) -> str:
        """All text still held, at the end of the choice; a stop string may be found in it."""
        text = self.release()
        return text if self.finish is not None else text + self._decoder.flush()

    def _stop_at(self, token_id: int, tokens: list[str | None]) -> str:
        """Ends at a stop id, unless a stop string was complete before."""
        own = self._decoder.step(token_id) if token_id in self._rules.visible_ids else ""
        tokens.append(own or None)
        text = self.release()
        if self.finish is not None:
            return text
        self.finish = FinishReason.STOP
        self.stop_reason = None if token_id in self._rules.model_ids else token_id
        return text + own + self._decoder.flush()

    def _fail(self, error: CodecError) -> str:
        text = self.release()
        if self.finish is None:
            self.finish = FinishReason.error(f"decode error: {error}")
        return text

    def _is_matched(self, matcher: StopMatcher) -> bool:
        """Whether a stop string was found, which ends the choice."""
        if matcher.matched is None:
            return False
        self.finish, self.stop_reason = FinishReason.STOP, matcher.matched
        return True
