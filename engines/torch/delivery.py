"""Delivery: what the batcher draws for one request, as chunks for the task that reads them.

The steps go on whether or not the reader comes back: the tokens that wait for it are then one chunk.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from pipeline import Control
from pipeline.protocols import (
    CompletionUsage,
    FinishReason,
    LLMEngineOutput,
    PromptTokensDetails,
    TopLogprob,
)

from ..ready_tokens import Bundle, ReadyTokens, bundle_max_tokens
from .order import Order
from .slots import Choice, Drawn, KvBytes, News


class Delivery:
    """The choices of one request and their news.

    `offers` makes the parameters for a decode worker from the choice whose prompt is computed; with it the first choice
    keeps its blocks to the end. `offer_token`, of the request's context, is called with lone tokens.
    """

    def __init__(
        self,
        order: Order,
        control: Control,
        *,
        imported: KvBytes | None = None,
        offers: Callable[[Choice], Any] | None = None,
        offer_token: Callable[[int], bool] | None = None,
    ) -> None:
        self.control = control
        self._order = order
        self._offers = offers
        self._ready: ReadyTokens[Choice, Drawn] = ReadyTokens(bundle_max_tokens(_candidates(order)))
        """The end of a choice is its finish reason and stop id."""
        if offer_token is not None and order.choices == 1 and order.sampling.logprobs is None:
            self._ready.take_lone = lambda drawn: offer_token(drawn.token_id)
        self._emitted_tokens = 0
        self._log_probs = [0.0] * order.choices
        first = self._choice(0, imported=imported, keeps_blocks=offers is not None)
        self.choices = [first, *(self._choice(index, leader=first) for index in range(1, order.choices))]
        self._open = set(range(order.choices))

    def _choice(self, index: int, **fields: Any) -> Choice:
        return Choice(order=self._order, index=index, receive=self._receive, **fields)

    def _receive(self, news: News) -> None:
        if news.error is not None:
            self._ready.fail(news.error)
        elif news.drawn is not None:
            end = None if news.finish is None else (news.finish, news.stop_id)
            self._ready.put(news.choice, [news.drawn], end, offers=True)

    async def chunks(self) -> AsyncGenerator[LLMEngineOutput, None]:
        """Yield the answer; after a stop a cancelled chunk ends it, after a kill nothing. Raise what a step raised."""
        control, ready = self.control, self._ready
        forget = control.on_stop(ready.news.wake)
        try:
            while self._open:
                while ready.waiting and not control.is_stopped:
                    yield self._chunk(ready.take())
                    if not self._open:
                        return
                if control.is_stopped:
                    if not control.is_killed:
                        yield self._cancelled()
                    return
                if ready.error is not None:
                    raise ready.error
                await ready.news.wait()
        finally:
            forget()

    def _chunk(self, bundle: Bundle[Choice, Drawn]) -> LLMEngineOutput:
        choice, drawn = bundle.choice, bundle.tokens
        self._emitted_tokens += len(drawn)
        chunk = LLMEngineOutput([one.token_id for one in drawn])
        if self._order.choices > 1:
            chunk.index = choice.index
        if drawn[0].logprob is not None:
            self._add_logprobs(chunk, choice.index, drawn)
        if bundle.end is not None:
            self._finish(chunk, choice, *bundle.end)
        return chunk

    def _add_logprobs(self, chunk: LLMEngineOutput, index: int, drawn: Sequence[Drawn]) -> None:
        own = [one.logprob or 0.0 for one in drawn]
        for logprob in own:  # token by token: however they came, the sum is the same to the last digit
            self._log_probs[index] += logprob
        chunk.cum_log_probs, chunk.log_probs = self._log_probs[index], own
        if drawn[0].top:
            chunk.top_logprobs = [_ranked(one, logprob) for one, logprob in zip(drawn, own, strict=True)]

    def _finish(self, chunk: LLMEngineOutput, choice: Choice, reason: FinishReason, stop_id: int | None) -> None:
        chunk.finish_reason, chunk.stop_reason = reason, stop_id
        if choice.index == 0 and self._offers is not None:
            chunk.disaggregated_params = self._offers(choice)
        self._open.discard(choice.index)
        if not self._open:
            chunk.completion_usage = self._usage()

    def _cancelled(self) -> LLMEngineOutput:
        chunk = LLMEngineOutput([], finish_reason=FinishReason.CANCELLED, completion_usage=self._usage())
        if self._order.choices > 1:
            chunk.index = min(self._open)
        return chunk

    def _usage(self) -> CompletionUsage:
        usage = CompletionUsage.of(len(self._order.prompt), self._emitted_tokens + self._ready.taken)
        if (cached := self.choices[0].cached_tokens) is not None:
            usage.prompt_tokens_details = PromptTokensDetails(cached)
        return usage


def _candidates(order: Order) -> int:
    """Return how many tokens with log probabilities come for each one."""
    return 0 if order.sampling.logprobs is None else 1 + order.sampling.logprobs


def _ranked(drawn: Drawn, own: float) -> list[TopLogprob]:
    """Return the candidates at the place of a token, itself among them."""
    found = [TopLogprob(rank, token_id, logprob) for rank, (token_id, logprob) in enumerate(drawn.top, 1)]
    if all(one.token_id != drawn.token_id for one in found):
        found.append(TopLogprob(drawn.rank or len(found) + 1, drawn.token_id, own))
    return found


def empty_chunks(choices: int) -> list[LLMEngineOutput]:
    """Return the answer to a request for no tokens."""
    chunks = [LLMEngineOutput.length() for _ in range(choices)]
    for index, chunk in enumerate(chunks if choices > 1 else []):
        chunk.index = index
    return chunks
