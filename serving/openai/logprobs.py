"""Log probabilities in the two OpenAI forms."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import define

from pipeline.protocols import BackendOutput, TopLogprob
from pipeline.protocols.openai import ChatLogprobs, ChosenLogprob, CompletionLogprobs, TokenLogprob


@define(slots=True)
class _Position:
    """One token of an answer: its text, id and log probability, and the likeliest tokens at its place."""

    text: str
    token_id: int
    logprob: float
    top: list[TopLogprob]


def _positions(output: BackendOutput) -> Iterator[_Position]:
    """The tokens for which the engine gave a log probability."""
    tops = output.top_logprobs or [[] for _ in output.token_ids]
    for text, token_id, logprob, top in zip(
        output.tokens, output.token_ids, output.log_probs or [], tops, strict=False
    ):
        yield _Position(text or "", token_id, logprob, top)


@define(slots=True)
class LogprobForm:
    """What a client wants to see: so many likely tokens beside the chosen one, texts or `token_id:<id>`."""

    top: int = 0
    as_token_ids: bool = False

    def chat(self, output: BackendOutput) -> ChatLogprobs | None:
        """The form of chat; None if the engine gave none."""
        if output.log_probs is None:
            return None
        return ChatLogprobs([self._chosen(position) for position in _positions(output)])

    def completion(self, output: BackendOutput, offset: int) -> CompletionLogprobs | None:
        """The form of completions, the text beginning at `offset` characters; None if the engine gave none."""
        if output.log_probs is None:
            return None
        logprobs = CompletionLogprobs()
        for position in _positions(output):
            logprobs.tokens.append(self._shown(position.text, position.token_id))
            logprobs.token_logprobs.append(position.logprob)
            logprobs.top_logprobs.append({each.token: each.logprob for each in self._likely(position)} or None)
            logprobs.text_offset.append(offset)
            offset += len(position.text)
        return logprobs

    def _chosen(self, position: _Position) -> ChosenLogprob:
        own = self._entry(position.text, position.token_id, position.logprob)
        return ChosenLogprob(own.token, own.logprob, own.bytes, self._likely(position))

    def _likely(self, position: _Position) -> list[TokenLogprob]:
        """The likeliest tokens as many as wanted, and the chosen one if it is not among them."""
        if not self.top:
            return []
        top = position.top[: self.top]
        likely = [self._entry(each.token or "", each.token_id, each.logprob, each.bytes) for each in top]
        if all(each.token_id != position.token_id for each in top):
            likely.append(self._entry(position.text, position.token_id, position.logprob))
        return likely

    def _entry(self, text: str, token_id: int, logprob: float, known_bytes: list[int] | None = None) -> TokenLogprob:
        return TokenLogprob(self._shown(text, token_id), logprob, known_bytes or (list(text.encode()) or None))

    def _shown(self, text: str, token_id: int) -> str:
        return f"token_id:{token_id}" if self.as_token_ids else text
