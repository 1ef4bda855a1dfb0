"""Delivery: what the batcher draws for one request, as chunks for the task that reads them.

It never fills up by more than the request's limits: the steps go on whether or not the reader comes back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

from pipeline import Control
from pipeline.loop import Wakeup
from pipeline.protocols import (
    CompletionUsage,
    FinishReason,
    LLMEngineOutput,
    PromptTokensDetails,
    TopLogprob,
)

from .order import Order
from .slots import Choice, Drawn, KvBytes, News


class Delivery:
    """The choices of one request and their news.

    `offers` makes the parameters for a decode worker from the choice whose prompt is computed; with it the first choice
    keeps its blocks to the end.
    """

    def __init__(
        self,
        order: Order,
        control: Control,
        *,
        imported: KvBytes | None = None,
        offers: Callable[[Choice], Any] | None = None,
    ) -> None:
        self.control = control
        self._order = order
        self._offers = offers
        self._news: deque[News] = deque()
        self._came = Wakeup()
        self._emitted_tokens = 0
        self._log_probs = [0.0] * order.choices
        first = self._choice(0, imported=imported, keeps_blocks=offers is not None)
        self.choices = [first, *(self._choice(index, leader=first) for index in range(1, order.choices))]
        self._open = set(range(order.choices))

    def _choice(self, index: int, **fields: Any) -> Choice:
        return Choice(order=self._order, index=index, receive=self._receive, **fields)

    def _receive(self, news: News) -> None:
        self._news.append(news)
        self._came.wake()

    async def chunks(self) -> AsyncGenerator[LLMEngineOutput, None]:
        """Yield the answer; after a stop a cancelled chunk ends it, after a kill nothing. Raise what a step raised."""
        control, news = self.control, self._news
        forget = control.on_stop(self._came.wake)
        try:
            while self._open:
                while news and not control.is_stopped:
                    yield self._chunk(news.popleft())
                    if not self._open:
                        return
                if control.is_stopped:
                    if not control.is_killed:
                        yield self._cancelled()
                    return
                await self._came.wait()
        finally:
            forget()

    def _chunk(self, news: News) -> LLMEngineOutput:
        choice, drawn = news.choice, news.drawn
        if news.error is not None:
            raise news.error
        assert drawn is not None, "news are a token or an error"
        self._emitted_tokens += 1
        chunk = LLMEngineOutput([drawn.token_id])
        if self._order.choices > 1:
            chunk.index = choice.index
        if drawn.logprob is not None:
            self._add_logprobs(chunk, choice.index, drawn)
        if news.finish is not None:
            self._finish(chunk, news)
        return chunk

    def _add_logprobs(self, chunk: LLMEngineOutput, index: int, drawn: Drawn) -> None:
        own = drawn.logprob
        assert own is not None
        self._log_probs[index] += own
        chunk.cum_log_probs, chunk.log_probs = self._log_probs[index], [own]
        if drawn.top:
            found = [TopLogprob(rank, token_id, logprob) for rank, (token_id, logprob) in enumerate(drawn.top, 1)]
            if all(one.token_id != drawn.token_id for one in found):
                found.append(TopLogprob(drawn.rank or len(found) + 1, drawn.token_id, own))
            chunk.top_logprobs = [found]

    def _finish(self, chunk: LLMEngineOutput, news: News) -> None:
        chunk.finish_reason, chunk.stop_reason = news.finish, news.stop_id
        if news.choice.index == 0 and self._offers is not None:
            chunk.disaggregated_params = self._offers(news.choice)
        self._open.discard(news.choice.index)
        if not self._open:
            chunk.completion_usage = self._usage()

    def _cancelled(self) -> LLMEngineOutput:
        chunk = LLMEngineOutput([], finish_reason=FinishReason.CANCELLED, completion_usage=self._usage())
        if self._order.choices > 1:
            chunk.index = min(self._open)
        return chunk

    def _usage(self) -> CompletionUsage:
        usage = CompletionUsage.of(len(self._order.prompt), self._emitted_tokens)
        if (cached := self.choices[0].cached_tokens) is not None:
            usage.prompt_tokens_details = PromptTokensDetails(cached)
        return usage


def empty_chunks(choices: int) -> list[LLMEngineOutput]:
    """Return the answer to a request for no tokens."""
    chunks = [LLMEngineOutput.length() for _ in range(choices)]
    for index, chunk in enumerate(chunks if choices > 1 else []):
        chunk.index = index
    return chunks
