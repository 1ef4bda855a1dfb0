"""ChoiceDecoder: the tokens of one choice to its text, up to where it stops. Pure.

    token ids ──► incremental text ──► stop ids ──► stop strings ──► visible text, finish reason

Source: dynamo lib/llm/src/backend.rs, Decoder; see `StopMatcher` for what is different.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from pipeline import Take
from pipeline.errors import CodecError
from pipeline.protocols import FinishReason, PreprocessedRequest

from .decoding import StopMatcher, TextDecoder

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
        """Return the rules of a request."""
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

    __slots__ = (
        "_count", "_decoder", "_matcher", "_min_tokens", "_rules", "_stop_ids", "_take", "finish", "is_finished",
        "stop_reason",
    )  # fmt: skip

    def __init__(self, decoder: TextDecoder, rules: StopRules) -> None:
        self._decoder = decoder
        self._rules = rules
        self._min_tokens = rules.min_tokens
        self._stop_ids = rules.visible_ids | rules.hidden_ids if rules.visible_ids else rules.hidden_ids
        self._matcher = StopMatcher(rules.stops, include=rules.include_stop) if rules.stops else None
        self._count = 0
        self._take: Take | None = None
        """Takes plain tokens, if the choice is the only one and its stream is fed."""
        self.is_finished = False
        """Whether the choice has ended, by a rule of ours or by the engine."""
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
                text = self.release()
                if self.finish is None:
                    self.finish = FinishReason.error(f"decode error: {error}")
                return shown + text
            tokens.append(text or None)
            if is_checked and self._matcher is not None:
                held = self._matcher.held
                text = self._matcher.feed(text)
                if self._is_matched(self._matcher):
                    tokens[-1] = text[len(held) :] or None
                    return shown + text
            shown += text
        return shown

    def step(self, token_id: int) -> str | None:
        """The text of one token, as `feed` gives it; None, with nothing changed, if the token may end the choice."""
        if self._matcher is not None or token_id in self._stop_ids or self.is_finished:
            return None
        try:
            text = self._decoder.step(token_id)
        except KeyboardInterrupt:
            raise
        except BaseException:  # of the tokenizer, which raises it again in the task of the request
            return None
        self._count += 1
        return text

    def relay(self, take: Take) -> Take:
        """Return what takes plain tokens of the only choice; it refuses one that may end the choice, or of another."""
        self._take = take
        return self._take_token

    def _take_token(self, token_id: int, index: int | None) -> bool:
        take = self._take
        assert take is not None, "the stream is fed"
        if index or (text := self.step(token_id)) is None:
            return False
        return take(token_id, index, text)

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

    def _is_matched(self, matcher: StopMatcher) -> bool:
        """Whether a stop string was found, which ends the choice."""
        if matcher.matched is None:
            return False
        self.finish, self.stop_reason = FinishReason.STOP, matcher.matched
        return True
