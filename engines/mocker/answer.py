"""Answer: one request on one rank, from its submission to its last chunk.

plan ──begin──► sequences on the rank ── steps ──► chunks: tokens, first with usage; a last one, empty
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import anyio
from anyio.lowlevel import checkpoint

from pipeline import RUNNING, Control
from pipeline.protocols import CompletionUsage, FinishReason, LLMEngineOutput, PromptTokensDetails

from ..ready_tokens import Bundle, bundle_max_tokens
from .horizon import TimedOutput
from .rank import Channel, Rank
from .request import RequestPlan
from .scheduling import AT_ONCE_TOKENS, Sequence
from .tokens import log_probabilities


class Answer:
    """The answer to one request. Its owner closes it; then it holds nothing on the rank.

    `params` come with the first chunk, for the decode worker. `last_delay_s` passes before the last chunk.
    `control` is a child of the request's own: `give_up` stops this answer and nothing else of the request. `offer`, of
    the request's context, is called with lone tokens.
    """

    def __init__(
        self,
        plan: RequestPlan,
        rank: Rank,
        control: Control,
        *,
        params: Any = None,
        last_delay_s: float = 0.0,
        offer: Callable[[int], bool] | None = None,
    ) -> None:
        self.rank = rank
        self.channel = Channel(bundle_max_tokens(plan.candidates))
        self.sequences = plan.sequences(rank.scheduler.block_size, rank.dp_rank)
        self.control = Control()
        control.link_child(self.control)
        self._plan = plan
        self._params = params
        self._last_delay_s = last_delay_s
        self._emitted_tokens = 0
        self._finished: list[Sequence] = []
        self._forget = self.control.on_stop(self._stopped)
        if offer is not None and not self._is_rich:
            self.channel.take_lone = offer
        if rank.latencies is not None:
            rank.latencies.begin(self.sequences, anyio.current_time())

    async def prepare(self) -> None:
        """Hash the prompts of all choices if they are long, with turns for other tasks in between."""
        for sequence in self.sequences:
            while sequence.prompt_tokens > AT_ONCE_TOKENS and sequence.hash_some():
                await checkpoint()

    def begin(self, *, holds_blocks: bool = False) -> None:
        """Submit all choices. With `holds_blocks` they keep their blocks in the end, until `release`."""
        for sequence in self.sequences:
            self.rank.submit(sequence, self.channel, holds_blocks=holds_blocks, pays_prompt=self._plan.pays_prompt)

    def release(self) -> None:
        """Release the blocks of an answer that holds them."""
        for sequence in self.sequences:
            self.rank.release(sequence)

    def close(self) -> None:
        """Remove it from the rank in any state. Idempotent; needs no loop."""
        self._forget()
        for sequence in self.sequences:
            self.rank.cancel(sequence)

    def _stopped(self) -> None:
        self.rank.catch_up()
        self.rank.flush(self.sequences)
        self.channel.news.wake()

    def give_up(self) -> None:
        """End it as a stop does: the engine is closing."""
        self.control.stop()

    @property
    def _is_rich(self) -> bool:
        """Whether each chunk has more than token ids."""
        return len(self.sequences) > 1 or self._plan.logprobs is not None

    async def chunks(self) -> AsyncGenerator[LLMEngineOutput, None]:
        """Yield the answer. Raises InvalidArgument if the rank can never serve it, and the rank's own failure."""
        channel, control = self.channel, self.control
        waiting = channel.waiting
        is_rich = self._is_rich
        while True:
            while waiting and (control.state is RUNNING or self._precedes_stop(waiting[0])):
                bundle = channel.take()
                sequence, token_ids, times_s = bundle.choice, bundle.tokens, bundle.times_s
                is_first = not self._emitted_tokens
                self._emitted_tokens += len(token_ids)
                if token_ids:
                    is_plain = times_s is None and not (is_first or is_rich)  # nearly every chunk
                    yield (
                        LLMEngineOutput(token_ids)
                        if is_plain
                        else self._chunk(sequence, token_ids, times_s, is_first=is_first)
                    )
                if bundle.end:
                    if await self._is_cut_short():
                        break
                    self._finished.append(sequence)
                    yield self._last(sequence, FinishReason.LENGTH, with_usage=self._is_done)
                    if self._is_done:
                        return
            if control.state is not RUNNING:
                if not control.is_killed:
                    yield self.cancelled()
                return
            if channel.error is not None:
                raise channel.error
            await channel.news.wait()

    def _precedes_stop(self, bundle: Bundle[Sequence, int]) -> bool:
        """Return whether the tokens of an answer that was stopped, and not killed, were due before that."""
        return bundle.times_s is not None and not self.control.is_killed

    async def finished(self) -> None:
        """Return when the rank has finished every choice; raises as `chunks`."""
        while self.channel.error is None:
            if not any(self.rank.follows(sequence) for sequence in self.sequences):
                return
            await self.channel.news.wait()
        raise self.channel.error

    def cancelled(self) -> LLMEngineOutput:
        """Return the last chunk of an abandoned answer: of a choice without its terminal chunk."""
        unfinished = next(sequence for sequence in self.sequences if sequence not in self._finished)
        return self._last(unfinished, FinishReason.CANCELLED, with_usage=True)

    @property
    def _is_done(self) -> bool:
        return len(self._finished) == len(self.sequences)

    async def _is_cut_short(self) -> bool:
        """Wait before the very last chunk if there is a delay; return whether a stop came meanwhile."""
        if self._last_delay_s and len(self._finished) + 1 == len(self.sequences):
            with anyio.move_on_after(self._last_delay_s):
                await self.control.stopped()
        return self.control.is_stopped

    def _chunk(
        self, sequence: Sequence, token_ids: list[int], times_s: array[float] | None, *, is_first: bool
    ) -> LLMEngineOutput:
        chunk = LLMEngineOutput(token_ids) if times_s is None else TimedOutput(token_ids, token_times_s=times_s)
        if len(self.sequences) > 1:
            chunk.index = sequence.owner
        if is_first:
            chunk.completion_usage = self._usage()
            chunk.disaggregated_params = self._params
        if self._plan.logprobs is not None:
            chunk.log_probs, chunk.top_logprobs = log_probabilities(token_ids, self._plan.logprobs)
        return chunk

    def _last(self, sequence: Sequence, reason: FinishReason, *, with_usage: bool) -> LLMEngineOutput:
        chunk = LLMEngineOutput([], finish_reason=reason)
        if len(self.sequences) > 1:
            chunk.index = sequence.owner
        if with_usage:
            chunk.completion_usage = self._usage()
        return chunk

    def _usage(self) -> CompletionUsage:
        usage = CompletionUsage.of(len(self._plan.prompt), self._emitted_tokens + self.channel.taken)
        if (cached := self.sequences[0].cached_tokens) is not None:
            usage.prompt_tokens_details = PromptTokensDetails(cached)
        return usage


def empty_answer(choices: int, control: Control) -> Iterator[LLMEngineOutput]:
    """Yield the whole answer to a request for no tokens."""
    if control.is_stopped:
        yield LLMEngineOutput.cancelled()
        return
    for index in range(choices):
        chunk = LLMEngineOutput.length()
        if choices > 1:
            chunk.index = index
        yield chunk
