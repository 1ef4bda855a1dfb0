"""Detokenize: token ids from an engine to text, ended at stop ids and stop strings: see `ChoiceDecoder`.

Source: dynamo lib/llm/src/backend.rs, Decoder; see `StopMatcher` for what is different.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from attrs import evolve

from pipeline import (
    Annotated,
    AnyContext,
    AsyncEngine,
    Context,
    ContractViolation,
    Operator,
    ResponseStream,
    Take,
    to_error,
)
from pipeline.errors import CodecError
from pipeline.foreign import foreign_errors, raise_if_ours
from pipeline.protocols import (
    BackendOutput,
    CompletionUsage,
    FinishReason,
    LLMEngineOutput,
    PreprocessedRequest,
    TopLogprob,
)

from .choice_decoder import ChoiceDecoder, StopRules
from .model import Model
from .tokenizer import Tokenizer


class Detokenize(
    Operator[PreprocessedRequest, Annotated[BackendOutput], PreprocessedRequest, Annotated[LLMEngineOutput]]
):
    """Turn the tokens of each choice into text, and end the choice at the request's stop conditions.

        PreprocessedRequest      ──► unchanged
        Annotated[BackendOutput] ◄── Annotated[LLMEngineOutput]

    Stands below the stage that retries a broken stream, so that a retry decodes behind all that was delivered. Events
    and items without data pass untouched, as does text the engine wrote itself. Text that may be the beginning of a
    stop string is held back; it is shown when it turns out not to be, and before an error or the end. Of a request that
    may go on with another worker it is left in its `migration_state` instead, where the next attempt takes it up.

    Once every choice has finished and one of them by our rules, the engine is stopped, the last item delivered, and the
    engine's stream closed; the caller's context is not stopped by this. An id that is no token finishes its choice with
    the error "decode error: ...", an item of a choice that does not exist ends all of them with an error finish. The
    number of tokens is the engine's business. An item of any other kind raises ContractViolation.

    Source: dynamo lib/llm/src/backend.rs, Backend.
    """

    def __init__(self, model: Model) -> None:
        self._tokenizer = model.tokenizer

    async def generate(
        self,
        request: Context[PreprocessedRequest],
        next: AsyncEngine[PreprocessedRequest, Annotated[LLMEngineOutput]],
    ) -> ResponseStream[Annotated[BackendOutput]]:
        with foreign_errors():
            decoding = Decoding(self._tokenizer, request.payload)
        below = request.child(request.payload)
        stream = await next.generate(below)
        return ResponseStream(_decode(stream, below, decoding), request, stream, relay=decoding.relay)


async def _decode(
    stream: ResponseStream[Annotated[LLMEngineOutput]], below: AnyContext, decoding: Decoding
) -> AsyncGenerator[Annotated[BackendOutput], None]:
    failure: Exception | None = None
    errors: list[Annotated[Any]] = []
    async with stream:
        try:
            async for item in stream:
                if item.event is not None and item.is_error:
                    errors.append(item)
                    break
                ready = decoding.convert(item)
                if decoding.is_over:
                    below.stop()
                if ready is not None:
                    yield ready
                if decoding.is_over:
                    return
        except BaseException as error:
            raise_if_ours(error)
            failure = error if isinstance(error, Exception) else to_error(error)
        for last in [*decoding.rest(is_broken=bool(errors or failure)), *errors]:
            if not below.is_killed:
                yield last
    if failure is not None and not below.is_killed:
        raise failure


_ONLY_CHOICE = frozenset([0])
"""The choices of nearly every request, shared by all of them."""


class Decoding:
    """All choices of one request. Pure; `is_over` once there is nothing left to wait for from the engine."""

    __slots__ = ("_choices", "_state", "_tokenizer", "_unfinished", "is_over")

    def __init__(self, tokenizer: Tokenizer, request: PreprocessedRequest) -> None:
        rules = StopRules.of(request)
        skip = request.output_options.skip_special_tokens is not False
        count = request.sampling_options.n or 1
        self._tokenizer = tokenizer
        self._choices = [
            ChoiceDecoder(tokenizer.decoder(request.token_ids, skip_special_tokens=skip), rules) for _ in range(count)
        ]
        self._state = request.migration_state if count == 1 else None
        if self._state is not None:
            self._choices[0].resume(self._state.held_text)
        self._unfinished = _ONLY_CHOICE if count == 1 else frozenset(range(count))
        self.is_over = False

    def convert(self, item: Annotated[LLMEngineOutput]) -> Annotated[BackendOutput] | None:
        """The item in text; itself if it is an event or without data, None if its choice has finished before."""
        output = item.data
        if output is None or item.event is not None:
            untouched: Annotated[Any] = item
            return untouched
        if not isinstance(output, LLMEngineOutput):
            raise ContractViolation(f"an engine's item carries LLMEngineOutput, this one {type(output).__name__}")
        index = output.index or 0
        if index not in self._unfinished:
            return None if 0 <= index < len(self._choices) else item.transfer(self._unknown_choice(output))
        choice = self._choices[index]
        tokens: list[str | None] = []
        if output.text is None:
            text = choice.feed(output.token_ids, tokens)
        else:
            text = output.text
            tokens += output.tokens or [None] * len(output.token_ids)
        finish, stop_reason = output.finish_reason, output.stop_reason
        if finish is not None or choice.finish is not None:
            text = self._finished(index, output, text)
            if choice.finish is not None:
                finish, stop_reason = choice.finish, choice.stop_reason
        if output.top_logprobs is not None or len(tokens) < len(output.token_ids):
            output = self._shown(output, len(tokens))
        chunk = BackendOutput(  # by position: this is made once per token
            output.token_ids,
            tokens,
            text or output.text,
            output.cum_log_probs,
            output.log_probs,
            output.top_logprobs,
            finish,
            stop_reason,
            output.index,
            output.completion_usage,
            output.disaggregated_params,
            output.encoder_result,
            output.worker_trace_link,
            output.engine_data,
            output.routing_data,
        )
        return Annotated(chunk, item.id, None, item.comment, item.error)

    def relay(self, take: Take) -> Take:
        """Return what takes plain tokens, as `convert` does items; it refuses one that may end its choice."""
        choices = self._choices
        if len(choices) == 1:
            return choices[0].relay(take)

        def take_token(token_id: int, index: int | None) -> bool:
            place = index or 0
            if place not in self._unfinished or (text := choices[place].step(token_id)) is None:
                return False
            return take(token_id, index, text)

        return take_token

    def _finished(self, index: int, output: LLMEngineOutput, text: str) -> str:
        """Note that the choice ends with this item, by the engine or our rules. Return the text with what was held."""
        choice = self._choices[index]
        if choice.finish is None:
            held = choice.flush()
            text = held + text if output.text is not None else text + held
        choice.is_finished = True
        self._unfinished -= {index}
        self.is_over = not self._unfinished and any(choice.finish is not None for choice in self._choices)
        return text

    def rest(self, is_broken: bool) -> list[Annotated[BackendOutput]]:
        """What unfinished choices still hold, as items without tokens.

        Of a broken stream only text: the worker that goes on with it can still complete an unfinished character. That
        text is left to that worker too, unless it ends the choice.
        """
        held = []
        heir = self._state if is_broken else None
        if heir is not None:
            heir.held_text = ""
        for index in sorted(self._unfinished):
            choice = self._choices[index]
            text = choice.release() if is_broken else choice.flush()
            if heir is not None and choice.finish is None:
                heir.held_text = text
            elif text or choice.finish is not None:
                ended = BackendOutput([], [], text or None, finish_reason=choice.finish, stop_reason=choice.stop_reason)
                ended.index = index if len(self._choices) > 1 else None
                held.append(Annotated(ended))
        return held

    def _unknown_choice(self, output: LLMEngineOutput) -> BackendOutput:
        """End the request: an engine that answers for an unknown choice cannot be trusted with the others."""
        self.is_over = True
        message = f"the engine answered for choice {output.index}, asked for were {len(self._choices)}"
        return BackendOutput([], [], index=output.index, finish_reason=FinishReason.error(message))

    def _shown(self, output: LLMEngineOutput, count: int) -> LLMEngineOutput:
        """The engine's chunk, cut behind the token that ended the choice, with the texts of its candidates."""
        if count < len(output.token_ids):
            output = _first_tokens(output, count)
        if output.top_logprobs is None:
            return output
        candidates = [[self._with_text(candidate) for candidate in position] for position in output.top_logprobs]
        return evolve(output, top_logprobs=candidates)

    def _with_text(self, candidate: TopLogprob) -> TopLogprob:
        """The candidate with its text and bytes, where the engine left them out and the id is a token."""
        if candidate.token is not None and candidate.bytes is not None:
            return candidate
        try:
            data = self._tokenizer.token_bytes(candidate.token_id)
        except CodecError:
            return candidate
        text = candidate.token if candidate.token is not None else data.decode(errors="replace")
        return evolve(candidate, token=text, bytes=list(data) if candidate.bytes is None else candidate.bytes)


def _first_tokens(output: LLMEngineOutput, count: int) -> LLMEngineOutput:
    """Return a chunk as if the engine had ended it behind so many of its tokens."""
    log_probs, usage, sum_of_all = output.log_probs, output.completion_usage, output.cum_log_probs
    cut = len(output.token_ids) - count
    if usage is not None:
        counts = CompletionUsage.of(usage.prompt_tokens, max(0, usage.completion_tokens - cut))
        usage = evolve(usage, completion_tokens=counts.completion_tokens, total_tokens=counts.total_tokens)
    if sum_of_all is not None:
        sum_of_all = sum_of_all - sum(log_probs[count:]) if log_probs else None
    return evolve(
        output,
        token_ids=output.token_ids[:count],
        log_probs=log_probs and log_probs[:count],
        top_logprobs=output.top_logprobs and output.top_logprobs[:count],
        cum_log_probs=sum_of_all,
        completion_usage=usage,
    )
