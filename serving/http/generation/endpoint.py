"""POST of a chat or a completion: an ASGI application for each.

    read ──► exchange ──► event stream, or one JSON answer
      └─────────┴───────► error status

Source: dynamo lib/llm/src/http/service/openai.rs, handler_{chat_completions,completions}, and disconnect.rs. Other
than there, a stream whose first item is an error gets that error's status too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable
from typing import Any

import anyio
from attrs import define, field, frozen
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from operators import validate
from pipeline import Context, PenstockError
from pipeline.protocols.openai import ChatCompletionRequest, CompletionRequest, apply_headers

from ...openai import (
    Answer,
    AnswerForm,
    ChatAnswer,
    ChatChunks,
    Chunks,
    CompletionAnswer,
    CompletionChunks,
    OpenAIRequest,
    UsageCount,
    has_prompts,
    one_per_prompt,
)
from ..caller import Caller, apply_key, caller_of
from ..forgotten import forget_frames
from ..gone import gone_of
from ..metrics import RequestMeter
from ..open_requests import OpenRequest
from ..problems import CLIENT_GONE, Problem, Refusal, explain
from ..request import RequestRecord, parse_body, read_body
from ..routing_headers import without_routing
from ..server_span import NoSpan, answer_attributes, span_of
from ..service import ServedModel, Service
from ..time_limits import RequestClock
from .exchange import Exchange
from .generation import Generation

_log = logging.getLogger(__name__)


@frozen
class Api:
    """One of the two generation APIs."""

    request: type[ChatCompletionRequest | CompletionRequest]
    endpoint: str
    id_prefix: str
    chunks: type[Chunks]
    answer: type[Answer]


CHAT = Api(ChatCompletionRequest, "chat_completions", "chatcmpl-", ChatChunks, ChatAnswer)
COMPLETIONS = Api(CompletionRequest, "completions", "cmpl-", CompletionChunks, CompletionAnswer)

NOT_IMPLEMENTED = ("functions", "function_call")
"""Fields of a chat that are refused with 501."""


@define(eq=False)
class _Incoming:
    """A request as it came: both ends of its connection, who sent it, and where what becomes of it is noted."""

    scope: Scope
    receive: Receive
    send: Send
    caller: Caller = field(init=False)
    record: RequestRecord = field(init=False)
    span: NoSpan = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.caller, self.record, self.span = caller_of(self.scope), RequestRecord.of(self.scope), span_of(self.scope)


class GenerationEndpoint:
    """Answers one API's requests for one service."""

    def __init__(self, service: Service, api: Api) -> None:
        self._service = service
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI. Every error becomes an answer; a client that is gone gets none."""
        came = _Incoming(scope, receive, send)
        try:
            open_request = self._service.open_requests.admit(came.caller.identity)
        except PenstockError as error:
            await self._refuse(came, error)
            return
        with open_request:
            try:
                request = await self._read(came)
            except ClientDisconnect:
                came.span.set_result(CLIENT_GONE)
                return
            except Exception as error:
                await self._refuse(came, error)
                return
            came.record.model = request.model
            with self._meter(request) as meter:
                came.record.meter = meter
                ended = await self._answer(request, came, meter, open_request)
                came.span.set_result(ended)
                meter.finish(ended)

    async def _read(self, came: _Incoming) -> OpenAIRequest:
        """Return the request in the body, as its headers and its key change it.

        Raise ClientDisconnect, or what is wrong with it.
        """
        headers, options = came.record.headers, self._service.options
        headers.require_json()
        body = await read_body(headers, came.receive, options.body_limit_mb, options.limits)
        request: OpenAIRequest = await parse_body(body, self._api.request, options)
        request.nvext = apply_headers(request.nvext, headers.values) if options.nvext else None
        if not options.shows_workers:
            request.nvext = without_routing(request.nvext)
        apply_key(came.caller, request, headers.values, nvext=options.nvext)
        return request

    def _meter(self, request: OpenAIRequest) -> RequestMeter:
        known = request.model in self._service.models
        telemetry = self._service.telemetry
        return RequestMeter(telemetry, request.model if known else None, self._api.endpoint, bool(request.stream))

    async def _answer(
        self, request: OpenAIRequest, came: _Incoming, meter: RequestMeter, open_request: OpenRequest
    ) -> Problem | None:
        """Answers the request; returns the problem it ended with, if any, which the client was told."""
        try:
            record, span = came.record, came.span
            model = self._find(request)
            metadata = record.headers.metadata(self._service.options.limits)
            record.context = context = Context(request, id=record.id, metadata=metadata)
            span.attach(context, record.headers.values)
            record.drop_headers()
            prompts = self._prompts(request)
            span.set_request(request, self._api.endpoint, len(prompts))
            availability = self._service.availability
            generation = Generation(model.graph, context, prompts, UsageCount(len(prompts)), meter, availability)
            patience = RequestClock(self._service.time_limits, meter.started_s)
            exchange = Exchange(
                generation, self._service.options, came.receive, came.send, patience, gone_of(came.scope)
            )
            open_request.watched = exchange
            with availability.admit(context):
                try:
                    failure = await self._exchange(exchange, self._form(request, context, len(prompts)))
                finally:
                    meter.add_prompts(generation.usage)
                    came.caller.spend(generation.usage.prompt_tokens + generation.usage.completion_tokens)
                    if span.is_recording:
                        span.set_answer(self._outcome(generation))
        except ClientDisconnect:
            return CLIENT_GONE
        except Exception as failed:
            problem = self._explain(failed)
            forget_frames(failed)
            await self._reply_problem(came, problem)
            return problem
        if failure is None:
            return None
        problem = self._explain(failure)
        forget_frames(failure)
        came.record.report(problem)
        return problem

    def _outcome(self, generation: Generation) -> dict[str, Any]:
        """What the span of the request shows of its answer."""
        answer_id = self._api.id_prefix + generation.context.id
        model, meter = generation.context.payload.model, generation.meter
        return answer_attributes(answer_id, model, generation.usage, meter.finish_reasons, meter.first_tokens_s)

    def _exchange(self, exchange: Exchange, form: AnswerForm) -> Awaitable[Exception | None]:
        """Return what answers; what it gives is what failed after the first event, which the client was told."""
        usage = exchange.generation.usage
        if exchange.generation.context.payload.stream:
            return exchange.stream(self._api.chunks(form, usage))
        return exchange.whole(self._api.answer(form, usage))

    def _find(self, request: OpenAIRequest) -> ServedModel:
        """The model asked for.

        Raises Refusal while not ready (503), for features there will never be (501), and for an unknown name (404).
        """
        self._service.availability.check()
        for name in NOT_IMPLEMENTED:
            if getattr(request, name, None) is not None:
                raise Refusal(501, f"`{name}` is not supported, use `tools`")
        model = self._service.models.get(request.model)
        if model is None:
            self._validate(request)  # an empty name is an invalid one first
            raise Refusal(404, "Model not found")
        return model

    def _prompts(self, request: OpenAIRequest) -> list[OpenAIRequest]:
        """One request for each prompt; a list is checked here as a whole, for the graph sees its prompts one by one."""
        if has_prompts(request):
            self._validate(request)
        return one_per_prompt(request)

    def _validate(self, request: OpenAIRequest) -> None:
        validate(request, ignore_unsupported=True, limits=self._service.options.request_limits)

    def _form(self, request: OpenAIRequest, context: Context[OpenAIRequest], prompts: int) -> AnswerForm:
        return AnswerForm.of(
            request,
            id=self._api.id_prefix + context.id,
            created=int(time.time()),
            prompts=prompts,
            force_usage=self._service.options.force_usage,
        )

    async def _refuse(self, came: _Incoming, error: Exception) -> None:
        """Answer a request that has not begun."""
        problem = self._explain(error)
        came.span.set_result(problem)
        await self._reply_problem(came, problem)

    async def _reply_problem(self, came: _Incoming, problem: Problem) -> None:
        """Answer with an error. One that is not read in time is left unsent; the rest of a body is not read here."""
        with anyio.move_on_after(self._service.time_limits.write_s):
            await came.record.reply_problem(came.send, problem)

    def _explain(self, failure: Exception) -> Problem:
        """What the client is told; what it is not told is logged."""
        problem = explain(failure, self._service.options.overload_status)
        if problem.kind == "internal":
            _log.error("a request failed", exc_info=failure)
        return problem
