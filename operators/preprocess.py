"""Preprocess: a chat or completion request in text to a request in tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from functools import partial

import anyio

from pipeline import Annotated, AsyncEngine, Context, InvalidArgument, Operator, ResponseStream
from pipeline.foreign import foreign_errors
from pipeline.phase import TRACKER, track_request
from pipeline.protocols import BackendOutput, NvExt, PreprocessedRequest, RequestTracker
from pipeline.protocols.limits import PromptWork, RequestLimits
from pipeline.protocols.openai import ChatCompletionRequest, CompletionRequest

from .chat_template import never
from .encoding import beyond_context, encoded, json_of_ids, json_of_text
from .model import Model
from .prompt import prompt_of
from .prompt_size import prompt_characters
from .prompt_threads import GiveUp, PromptThreads, offer_threads
from .request_options import extra_args, output_options, routing_hints, sampling_options, stop_conditions
from .request_timing import with_routing
from .validation import DEFAULT_LIMITS, validate

PROMPT_TOKENS = "prompt_tokens"
"""Registry entry where the length of the prompt is left, for whoever counts the tokens of the answer.

An answer that ends at a stop string has no last word of its worker, and its usage only this.
"""

Encode = Callable[[str], list[int]]
"""Text -> token ids."""
Made = tuple[PreprocessedRequest, list[Annotated[BackendOutput]]]
"""The request in tokens, and the annotations asked for."""

REQUEST_ID = "request_id"
FORMATTED_PROMPT = "formatted_prompt"
TOKEN_IDS = "token_ids"


class Preprocess(
    Operator[
        ChatCompletionRequest | CompletionRequest,
        Annotated[BackendOutput],
        PreprocessedRequest,
        Annotated[BackendOutput],
    ]
):
    """Validates a request, renders and tokenizes its prompt, and says what it asks for in the engine's terms.

        ChatCompletionRequest | CompletionRequest ──► PreprocessedRequest
        Annotated[BackendOutput]                  ◄── unchanged, or with what was asked for

    Raises InvalidArgument that names the field for whatever is wrong with the request, and for more than one prompt:
    who serves a batch splits it before. `ignore_unsupported` lets fields pass that have no meaning here. A request
    beyond one of the `limits` is refused with that limit in the error's `exceeded`.

    A prompt longer than `inline_prompt_characters` is checked, rendered and tokenized in a thread, as `work` has it, so
    that the loop goes on with others. Raises TooManyPrompts if too many wait for a thread, and Cancelled, at once, if
    the request is stopped or killed meanwhile: the thread stops after the piece of text that it is at, and is not
    waited for. What that asks of tokenizers is in `Tokenizer`.

    The stream is the next stage's own, unless the request asks for something: of the annotations (`nvext.annotations`)
    `request_id`, `formatted_prompt` and `token_ids` then come first, as events, in this order. The length of the prompt
    in tokens is left in the registry, under `PROMPT_TOKENS`.

    With `wall_ms`, milliseconds since the epoch, each request has a tracker from the moment it comes, which all stages
    below share and `pipeline.phase.tracker_of` finds. Who asks for its workers or its timing (`nvext.extra_fields`, or
    a `query_instance_id:` annotation) has them in the `routing_data` of the first and the last item. `perf_s` is a
    clock for what tokenizing takes, as `time.perf_counter`: without one that is the loop's, which may know milliseconds
    only, and what is tokenized in a thread is not timed. Without `wall_ms` nothing is tracked.

    Source: dynamo lib/llm/src/preprocessor.rs, OpenAIPreprocessor.
    """

    def __init__(
        self,
        model: Model,
        *,
        ignore_unsupported: bool = False,
        limits: RequestLimits = DEFAULT_LIMITS,
        work: PromptWork | None = None,
        wall_ms: Callable[[], int] | None = None,
        perf_s: Callable[[], float] | None = None,
    ) -> None:
        self.model = model
        self._ignore_unsupported, self._limits = ignore_unsupported, limits
        self._threads = PromptThreads(work)
        self._wall_ms, self._perf_s = wall_ms, perf_s

    async def generate(
        self,
        request: Context[ChatCompletionRequest | CompletionRequest],
        next: AsyncEngine[PreprocessedRequest, Annotated[BackendOutput]],
    ) -> ResponseStream[Annotated[BackendOutput]]:
        tracker = None if self._wall_ms is None else track_request(self._wall_ms)
        payload, annotations = await self._made(request, tracker)
        request.registry.insert_shared(PROMPT_TOKENS, len(payload.token_ids))
        if self._threads.is_long(len(payload.token_ids)):
            offer_threads(request, self._threads)
        if tracker is None:
            stream = await next.generate(request.with_payload(payload))
        else:
            tracker.record_isl(len(payload.token_ids))
            payload.tracker = tracker
            request.registry.insert_shared(TRACKER, tracker)
            stream = await next.generate(request.with_payload(payload))
            stream = with_routing(stream, request, tracker)
        if not annotations:
            return stream
        return ResponseStream(_announced(annotations, stream), request, stream)

    async def _made(
        self, request: Context[ChatCompletionRequest | CompletionRequest], tracker: RequestTracker | None
    ) -> Made:
        """What is made of the request, here or in a thread."""
        make = partial(self._make, request.payload, request.id, tracker)
        with foreign_errors():  # of a tokenizer or a template, whose panic is no Exception
            if self._threads.is_long(
                prompt_characters(request.payload, self._threads.settings.inline_prompt_characters)
            ):
                return await self._threads.run(partial(make, self._perf_s), request.control)
            return make(self._perf_s or anyio.current_time, never)

    def _make(
        self,
        asked: ChatCompletionRequest | CompletionRequest,
        request_id: str,
        tracker: RequestTracker | None,
        now_s: Callable[[], float] | None,
        give_up: GiveUp,
    ) -> Made:
        validate(asked, ignore_unsupported=self._ignore_unsupported, limits=self._limits)
        encode: Encode = partial(encoded, self.model, _place(asked), self._limits, give_up)
        if tracker is not None and now_s is not None:
            encode = partial(_timed, encode, tracker, now_s)
        return preprocess(asked, self.model, request_id, encode, give_up)


def _timed(encode: Encode, tracker: RequestTracker, now_s: Callable[[], float], text: str) -> list[int]:
    began_s = now_s()
    found = encode(text)
    tracker.record_tokenize_latency(now_s() - began_s)
    return found


def preprocess(
    request: ChatCompletionRequest | CompletionRequest,
    model: Model,
    request_id: str,
    encode: Encode,
    give_up: GiveUp = never,
) -> Made:
    """A valid request in tokens, and the annotations it asks for. Pure. Raises as `Preprocess`."""
    nvext = request.nvext or NvExt()
    wanted = nvext.annotations or []
    given = nvext.token_data
    prompt = prompt_of(request, model, give_up) if given is None or FORMATTED_PROMPT in wanted else given
    asked = prompt if given is None else given
    if isinstance(asked, str):
        token_ids = encode(asked)
    else:
        token_ids = list(asked)
        _check_token_ids(token_ids, model, "prompt" if given is None else "nvext.token_data")
    values = {
        REQUEST_ID: json_of_text(request_id) if REQUEST_ID in wanted else None,
        FORMATTED_PROMPT: json_of_text(prompt) if FORMATTED_PROMPT in wanted and isinstance(prompt, str) else None,
        TOKEN_IDS: json_of_ids(token_ids) if TOKEN_IDS in wanted and given is None else None,
    }
    annotations: list[Annotated[BackendOutput]] = [
        Annotated(None, event=name, comment=[text]) for name, text in values.items() if text is not None
    ]
    return in_tokens(request, model, token_ids), annotations


def _place(request: ChatCompletionRequest | CompletionRequest) -> str:
    """The field that the prompt came in."""
    return "messages" if isinstance(request, ChatCompletionRequest) else "prompt"


def _check_token_ids(token_ids: list[int], model: Model, field: str) -> None:
    """Raises InvalidArgument for an id that is no token of the model: engines fail on it, or read beyond a table."""
    place = model.tokenizer.first_unknown(token_ids) if model.checks_token_ids else None
    if place is not None:
        raise InvalidArgument(
            f"{field}: {token_ids[place]} at index {place} is no token id of model {model.name}",
            field=f"{field}[{place}]",
        )


def in_tokens(
    request: ChatCompletionRequest | CompletionRequest, model: Model, token_ids: list[int]
) -> PreprocessedRequest:
    """The request in the engine's terms, with these tokens as its prompt. Raises as `Preprocess`."""
    nvext = request.nvext or NvExt()
    eos_token_ids = [] if request.ignore_eos else list(model.eos_token_ids)
    conditions = stop_conditions(request, eos_token_ids)
    if request.prompt_embeds is None:
        conditions.max_tokens = fit(model, len(token_ids), conditions.max_tokens, _place(request))
    return PreprocessedRequest(
        token_ids,
        model=request.model,
        prompt_embeds=request.prompt_embeds,
        stop_conditions=conditions,
        sampling_options=sampling_options(request),
        output_options=output_options(request),
        eos_token_ids=eos_token_ids,
        annotations=list(nvext.annotations or ()),
        routing=routing_hints(request),
        router=nvext.router,
        extra_args=extra_args(request),
        mm_processor_kwargs=request.mm_processor_kwargs,
        request_timestamp_ms=nvext.request_timestamp_ms,
    )


def fit(model: Model, prompt_tokens: int, max_tokens: int | None, place: str) -> int | None:
    """How many tokens the answer may have: as many as asked for, else all that are left; None leaves it to the engine.

    Raises InvalidArgument if the prompt, which came in the field `place`, or prompt and answer together are more than
    the model takes, where the model wants that checked here.
    """
    limit = model.context_length
    if limit is None:
        return max_tokens
    if prompt_tokens >= limit and model.reject_prompt_overflow:
        raise beyond_context(model, str(prompt_tokens), place)
    answer = max_tokens or 1
    if prompt_tokens + answer > limit and model.reject_total_overflow:
        raise InvalidArgument(
            f"This model takes at most {limit} combined prompt and output tokens. However, your messages resulted in "
            f"{prompt_tokens} tokens and the request asks for {answer} output tokens.",
            field=place,
        )
    return limit - prompt_tokens if max_tokens is None and model.reject_total_overflow else max_tokens


async def _announced(
    annotations: list[Annotated[BackendOutput]], stream: ResponseStream[Annotated[BackendOutput]]
) -> AsyncGenerator[Annotated[BackendOutput], None]:
    """The annotations, then the stream."""
    async with stream:
        for annotation in annotations:
            if stream.context.is_killed:
                return
            yield annotation
        async for item in stream:
            yield item
