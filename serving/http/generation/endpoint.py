"""POST of a chat or a completion: an ASGI application for each.

    read ──► Generation ──► event stream, or one JSON answer
      └─────────┴─────────► error status

Source: dynamo lib/llm/src/http/service/openai.rs, handler_{chat_completions,completions}, and disconnect.rs. Other
than there, a stream whose first item is an error gets that error's status too.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import anyio
from attrs import define, field, frozen
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from operators.text import validate
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
from ..metrics import RequestMeter
from ..open_requests import OpenRequest
from ..problems import CLIENT_GONE, Problem, Refusal, explain
from ..request import RequestRecord, parse_body, read_body
from ..routing_headers import without_routing
from ..server_span import NoSpan, answer_attributes, span_of
from ..service import ServedModel, Service
from ..side_task import task_starter
from ..time_limits import RequestClock
from .generation import Generation, on_gone_of
from .replies import Reply, StreamedReply, WholeReply

_log = logging.getLogger(__name__)


@frozen
class Api:
    """One of the two generation APIs."""

    request: type[ChatCompletionRequest | CompletionRequest]
    endpoint: str
    """Its name in the metrics."""
    id_prefix: str
    """What the ids of its answers begin with."""
    chunks: type[Chunks]
    answer: type[Answer]


CHAT = Api(ChatCompletionRequest, "chat_completions", "chatcmpl-", ChatChunks, ChatAnswer)
COMPLETIONS = Api(CompletionRequest, "completions", "cmpl-", CompletionChunks, CompletionAnswer)

NOT_IMPLEMENTED = ("functions", "function_call")
"""Fields of a chat that are refused with 501."""


@define(eq=False)
class _Incoming:
    """A request as it came: ASGI's three arguments, and what the middlewares put into the scope."""

    scope: Scope
    receive: Receive
    send: Send
    caller: Caller = field(init=False)
    record: RequestRecord = field(init=False)
    span: NoSpan = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.caller, self.record, self.span = caller_of(self.scope), RequestRecord.of(self.scope), span_of(self.scope)


class GenerationEndpoint:
    """Answers the requests of one API for one service."""

    def __init__(self, service: Service, api: Api) -> None:
        self._service = service
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI. Every error becomes an answer, unless the client is gone."""
        incoming = _Incoming(scope, receive, send)
        try:
            open_request = self._service.open_requests.admit(incoming.caller.identity)
        except PenstockError as error:
            await self._refuse(incoming, error)
            return
        with open_request:
            try:
                request = await self._read(incoming)
            except ClientDisconnect:
                incoming.span.set_result(CLIENT_GONE)
                return
            except Exception as error:
                await self._refuse(incoming, error)
                return
            incoming.record.model = request.model
            with self._meter(request) as meter:
                incoming.record.meter = meter
                problem = await self._answer(request, incoming, meter, open_request)
                incoming.span.set_result(problem)
                meter.finish(problem)

    # -- reading the request

    async def _read(self, incoming: _Incoming) -> OpenAIRequest:
        """Return the request in the body, changed by its headers and its key.

        Raise ClientDisconnect, or the error of an invalid request.
        """
        headers, options = incoming.record.headers, self._service.options
        headers.require_json()
        body = await read_body(headers, incoming.receive, options.body_limit_mb, options.limits)
        request: OpenAIRequest = await parse_body(body, self._api.request, options)
        request.nvext = apply_headers(request.nvext, headers.values) if options.nvext else None
        if not options.shows_workers:
            request.nvext = without_routing(request.nvext)
        apply_key(incoming.caller, request, headers.values, nvext=options.nvext)
        return request

    def _meter(self, request: OpenAIRequest) -> RequestMeter:
        known = request.model in self._service.models
        telemetry = self._service.telemetry
        return RequestMeter(telemetry, request.model if known else None, self._api.endpoint, bool(request.stream))

    def _find_model(self, request: OpenAIRequest) -> ServedModel:
        """Return the model of the request.

        Raise Refusal while not ready (503), for fields that will never be supported (501), for an unknown name (404).
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
        """Return one request for each prompt. A list is validated here: the graph sees its prompts one by one."""
        if has_prompts(request):
            self._validate(request)
        return one_per_prompt(request)

    def _validate(self, request: OpenAIRequest) -> None:
        validate(request, ignore_unsupported=True, limits=self._service.options.request_limits)

    # -- answering it

    async def _answer(
        self, request: OpenAIRequest, incoming: _Incoming, meter: RequestMeter, open_request: OpenRequest
    ) -> Problem | None:
        """Answer the request. Return the problem in the answer, None for a whole one."""
        try:
            generation = self._generation(request, incoming, meter)
            open_request.watched = generation
            with self._service.availability.admit(generation.context):
                try:
                    failure = await generation.run(self._reply(generation, incoming))
                finally:
                    meter.add_prompts(generation.usage)
                    incoming.caller.spend(generation.usage.prompt_tokens + generation.usage.completion_tokens)
                    if incoming.span.is_recording:
                        incoming.span.set_answer(self._outcome(generation))
        except ClientDisconnect:
            return CLIENT_GONE
        except Exception as failed:
            problem = self._explain(failed)
            _drop_tracebacks(failed)
            await self._reply_problem(incoming, problem)
            return problem
        if failure is None:
            return None
        problem = self._explain(failure)
        _drop_tracebacks(failure)
        incoming.record.report(problem)
        return problem

    def _generation(self, request: OpenAIRequest, incoming: _Incoming, meter: RequestMeter) -> Generation:
        """Return the generation of a valid request. Raise what refuses it."""
        record, span, service = incoming.record, incoming.span, self._service
        model = self._find_model(request)
        metadata = record.headers.metadata(service.options.limits)
        record.context = context = Context(request, id=record.id, metadata=metadata)
        span.attach(context, record.headers.values)
        record.drop_headers()
        prompts = self._prompts(request)
        span.set_request(request, self._api.endpoint, len(prompts))
        return Generation(
            model.graph,
            context,
            prompts,
            UsageCount(len(prompts)),
            meter,
            service.availability,
            RequestClock(service.time_limits, meter.started_s),
            incoming.receive,
            on_gone_of(incoming.scope),
            task_starter(),
        )

    def _reply(self, generation: Generation, incoming: _Incoming) -> Reply:
        """Return the reply in the form that the request wants."""
        api, options, usage = self._api, self._service.options, generation.usage
        form, on_gone, start = self._form(generation), generation.lose_client, generation.start
        if generation.context.payload.stream:
            return StreamedReply(incoming.send, on_gone, start, api.chunks(form, usage), options)
        return WholeReply(incoming.send, on_gone, start, api.answer(form, usage), options)

    def _form(self, generation: Generation) -> AnswerForm:
        return AnswerForm.of(
            generation.context.payload,
            id=self._api.id_prefix + generation.context.id,
            created=int(time.time()),
            prompts=len(generation.prompts),
            force_usage=self._service.options.force_usage,
        )

    def _outcome(self, generation: Generation) -> dict[str, Any]:
        """Return the attributes of the answer for the request's span."""
        answer_id = self._api.id_prefix + generation.context.id
        model, meter = generation.context.payload.model, generation.meter
        return answer_attributes(answer_id, model, generation.usage, meter.finish_reasons, meter.first_tokens_s)

    # -- errors

    async def _refuse(self, incoming: _Incoming, error: Exception) -> None:
        """Answer a request that has not begun."""
        problem = self._explain(error)
        incoming.span.set_result(problem)
        await self._reply_problem(incoming, problem)

    async def _reply_problem(self, incoming: _Incoming, problem: Problem) -> None:
        """Answer with an error, unless the client does not read it in time. The rest of a body is not read here."""
        with anyio.move_on_after(self._service.time_limits.write_s):
            await incoming.record.reply_problem(incoming.send, problem)

    def _explain(self, failure: Exception) -> Problem:
        """Return the problem for the client; log the failure if the problem hides it."""
        problem = explain(failure, self._service.options.overload_status)
        if problem.kind == "internal":
            _log.error("a request failed", exc_info=failure)
        return problem


def _drop_tracebacks(error: BaseException) -> None:
    """Drop the tracebacks of an error that is answered, and of the errors that led to it.

    A traceback has frames, which refer to the request and mostly to the error again. Such a circle would keep a prompt
    of maybe millions of tokens until a garbage collection, and every collection before that would visit it.
    """
    todo: list[BaseException | None] = [error]
    seen: set[int] = set()
    while todo:
        each = todo.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = None
        todo += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            todo += each.exceptions
