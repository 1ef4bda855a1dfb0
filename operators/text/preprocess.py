"""Preprocess: a chat or completion request in text to a request in tokens.

A request's prompt: its text as the model reads it, or the token ids it brings.

Source: dynamo lib/llm/src/preprocessor.rs, apply_template and gather_tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeGuard

import anyio

from pipeline import Annotated, AsyncEngine, Context, InvalidArgument, Operator, ResponseStream
from pipeline.foreign import foreign_errors
from pipeline.llm import TRACKER, track_request
from pipeline.protocols import BackendOutput, PreprocessedRequest, RequestTracker
from pipeline.protocols.limits import PromptWork, RequestLimits
from pipeline.protocols.openai import ChatCompletionRequest, ChatMessage, CompletionRequest, NvExt
from pipeline.threads import GiveUp
from pipeline.wire import plain_from_json, to_plain

from .chat_template import Message, never
from .model import Model
from .options import extra_args, output_options, routing_hints, sampling_options, stop_conditions
from .prompt_threads import PromptThreads, beyond_context, encoded, json_of_ids, json_of_text, offer_threads
from .request_size import prompt_characters
from .routing_report import with_routing
from .validation import DEFAULT_LIMITS, validate


def prompt_of(
    request: ChatCompletionRequest | CompletionRequest, model: Model, give_up: GiveUp = never
) -> str | list[int]:
    """The text to tokenize, without NUL characters, or token ids that are used as they are.

    A chat is rendered by the model's template unless `nvext.use_raw_prompt` wants its texts alone. Raises
    InvalidArgument for several prompts in one request, and for what the template refuses.
    """
    found = _chat(request, model, give_up) if isinstance(request, ChatCompletionRequest) else _single(request)
    return found.replace("\0", "") if isinstance(found, str) else found


def _single(request: CompletionRequest) -> str | list[int]:
    """The one prompt of a completion request; no token ids where it has embeddings only."""
    prompt = request.prompt
    if prompt is None or isinstance(prompt, str):
        return prompt or []
    if _is_token_ids(prompt):
        return prompt
    if len(prompt) > 1:
        raise InvalidArgument(f"one prompt can be served at a time, got {len(prompt)}", field="prompt")
    (only,) = prompt
    assert not isinstance(only, int), "a list of ids was returned above"
    return only


def _is_token_ids(prompt: Sequence[Any]) -> TypeGuard[list[int]]:
    return not prompt or isinstance(prompt[0], int)  # the first shows it: no list holds both ids and texts


def _chat(request: ChatCompletionRequest, model: Model, give_up: GiveUp) -> str:
    if (raw := raw_prompt(request)) is not None:
        return raw
    template = model.chat_template
    if template is None:
        raise InvalidArgument(f"model {model.name} has no chat template, so it cannot chat", field="messages")
    begins = begins_answer(request)
    text = template.render(
        [_plain(message) for message in request.messages],
        tools=None if request.tool_choice == "none" else to_plain(request.tools),
        add_generation_prompt=begins,
        args=template_args(request),
        give_up=give_up,
    )
    return _open_ended(text, _text(request.messages[-1])) if request.continue_final_message else text


def raw_prompt(request: ChatCompletionRequest) -> str | None:
    """Return the texts of a chat that no template is to be used for; None for any other."""
    if request.nvext is None or not request.nvext.use_raw_prompt:
        return None
    return "\n".join(_text(message) for message in request.messages)


def begins_answer(request: ChatCompletionRequest) -> bool:
    """Return whether the template is to begin an answer. Raise InvalidArgument if the last message is to go on too."""
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise InvalidArgument(
            "continue_final_message and add_generation_prompt exclude each other", field="continue_final_message"
        )
    return not continues if request.add_generation_prompt is None else request.add_generation_prompt


def _plain(message: ChatMessage) -> Message:
    """The message as templates expect it: unset fields left out, arguments of tool calls as objects."""
    plain: Message = to_plain(message)
    for call in plain.get("tool_calls", ()):
        call["function"]["arguments"] = plain_from_json(call["function"]["arguments"])
    return plain


def _text(message: ChatMessage) -> str:
    """The text of a message, of all its parts."""
    if isinstance(message.content, list):
        return "\n".join(part.text for part in message.content if part.text is not None)
    return message.content or ""


def _open_ended(prompt: str, last_text: str) -> str:
    """The prompt without what the template writes behind the last message, so that the answer continues it."""
    last_text = last_text.strip()
    at = prompt.rfind(last_text)
    if at < 0:
        raise InvalidArgument("the chat template changes the last message", field="continue_final_message")
    return prompt[: at + len(last_text)]


def template_args(request: ChatCompletionRequest) -> dict[str, Any]:
    """Names for the template: whether and how hard to think, then what the request gives itself."""
    args: dict[str, Any] = {}
    thinking: object = request.thinking
    if isinstance(thinking, dict):
        thinking = thinking.get("type") != "disabled"
    if request.reasoning_effort is not None:
        args["reasoning_effort"] = request.reasoning_effort
        if request.reasoning_effort == "none":
            thinking = False
    if thinking is not None:
        args |= {"thinking": thinking, "enable_thinking": thinking}
    return args | (request.chat_template_args or {})


PROMPT_TOKENS = "prompt_tokens"
"""Registry entry with the length of the prompt in tokens, for the stage that counts the tokens of the answer.

An answer that ends at a stop string has no last word of its worker, and its usage only this.
"""

Encode = Callable[[str], list[int]]
"""Text -> token ids."""
Made = tuple[PreprocessedRequest, list[Annotated[BackendOutput]]]
"""The request in tokens, and the annotations it wants."""

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
    """Validate a request, render and tokenize its prompt, and translate its options to the engine's.

        ChatCompletionRequest | CompletionRequest ──► PreprocessedRequest
        Annotated[BackendOutput]                  ◄── unchanged, or with the annotations wanted

    Raises InvalidArgument that names the field for whatever is wrong with the request, and for more than one prompt:
    the caller splits a batch before. `ignore_unsupported` lets fields pass that have no meaning here. A request
    beyond one of the `limits` is refused with that limit in the error's `exceeded`.

    A prompt longer than `inline_prompt_characters` is checked, rendered and tokenized in a thread, as `work` has it, so
    that the loop goes on with others. Raises TooManyPrompts if too many wait for a thread, and Cancelled, at once, if
    the request is stopped or killed meanwhile: the thread stops after the piece of text that it is at, and is not
    waited for. `Tokenizer` states what that requires of tokenizers.

    The stream is the next stage's own, unless the request wants annotations: of them (`nvext.annotations`)
    `request_id`, `formatted_prompt` and `token_ids` then come first, as events, in this order. The length of the prompt
    in tokens is left in the registry, under `PROMPT_TOKENS`.

    With `wall_ms`, milliseconds since the epoch, each request has a tracker from the moment it comes, which all stages
    below share and `pipeline.llm.tracker_of` finds. A request that wants its workers or its timing
    (`nvext.extra_fields`, or a `query_instance_id:` annotation) has them in the `routing_data` of
    the first and the last item. `perf_s` is a clock for the time that tokenizing takes, as `time.perf_counter`; without
    one it is the loop's, which may count whole milliseconds only, and what is tokenized in a thread is not timed.
    Without `wall_ms` nothing is tracked.

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
        return stream.prepend(*annotations) if annotations else stream

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
        request: ChatCompletionRequest | CompletionRequest,
        request_id: str,
        tracker: RequestTracker | None,
        now_s: Callable[[], float] | None,
        give_up: GiveUp,
    ) -> Made:
        validate(request, ignore_unsupported=self._ignore_unsupported, limits=self._limits)
        encode: Encode = partial(encoded, self.model, _place(request), self._limits, give_up)
        if tracker is not None and now_s is not None:
            encode = partial(_timed, encode, tracker, now_s)
        return preprocess(request, self.model, request_id, encode, give_up)


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
    """Return a valid request in tokens, and the annotations it wants. Pure. Raise as `Preprocess`."""
    nvext = request.nvext or NvExt()
    wanted = nvext.annotations or []
    given = nvext.token_data
    prompt = prompt_of(request, model, give_up) if given is None or FORMATTED_PROMPT in wanted else given
    source = prompt if given is None else given
    if isinstance(source, str):
        token_ids = encode(source)
    else:
        token_ids = list(source)
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
    """Return how many tokens the answer may have: the request's limit, else all that are left; None for no limit.

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
