"""POST of a chat or a completion: an ASGI application for each.

    read ──► Generation ──► event stream, or one JSON answer
      └─────────┴─────────► error status

Source: dynamo lib/llm/src/http/service/openai.rs, handler_{chat_completions,completions}, and disconnect.rs. Other
than there, a stream whose first item is an error gets that error's status too.
"""

from __future__ import annotations

import logging
import time
from math import inf

import anyio
from attrs import frozen
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
from ...problems import CLIENT_GONE, Problem, Refusal, explain
from ..body import parse_body, read_body
from ..caller import Caller, apply_key
from ..metrics import RequestMeter
from ..open_requests import OpenRequest, RequestClock
from ..request import JSON_HEADERS, RequestRecord
from ..routing_headers import without_routing
from ..server_span import answer_attributes, request_attributes
from ..service import ServedModel, Service
from ..side_task import task_starter
from .generation import ON_GONE, Generation
from .reply import STREAM_HEADERS, Reply, StreamedReply, WholeReply

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


@frozen(eq=False)
class _Incoming:
    """A request as it came: its record, its caller, and two arguments of ASGI."""

    record: RequestRecord
    caller: Caller
    receive: Receive
    send: Send


class GenerationEndpoint:
    """Answers the requests of one API for one service."""

    def __init__(self, service: Service, api: Api) -> None:
        self._service = service
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI. Every error becomes an answer, unless the client is gone."""
        record = RequestRecord.of(scope)
        incoming = _Incoming(record, caller := record.caller, receive, send)
        try:
            open_request = self._service.open_requests.admit(caller.identity)
        except PenstockError as error:
            await self._refuse(incoming, error)
            return
        with open_request:
            try:
                request = await self._read(incoming)
            except ClientDisconnect:
                record.span.set_result(CLIENT_GONE)
                return
            except Exception as error:
                await self._refuse(incoming, error)
                return
            record.model = request.model
            known = request.model if request.model in self._service.models else None
            with RequestMeter.of(self._service.telemetry, known, self._api.endpoint, bool(request.stream)) as meter:
                record.meter = meter
                problem = await self._answer(request, incoming, meter, open_request)
                record.span.set_result(problem)
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

    def _find_model(self, request: OpenAIRequest) -> ServedModel:
        """Return the model of the request.

        Raise Refusal while not ready, without any model or for one that is awaited (503), for fields that will never be
        supported (501), for an unknown name (404).
        """
        self._service.availability.check()
        for name in NOT_IMPLEMENTED:
            if getattr(request, name, None) is not None:
                raise Refusal(501, f"`{name}` is not supported, use `tools`")
        model = self._service.models.get(request.model)
        if model is None:
            self._validate(request)  # an empty name is an invalid one first
            self._service.check_absent(request.model)
            raise Refusal(404, "Model not found")
        return model

    def _validate(self, request: OpenAIRequest) -> None:
        validate(request, ignore_unsupported=True, limits=self._service.options.request_limits)

    # -- answering it

    async def _answer(
        self, request: OpenAIRequest, incoming: _Incoming, meter: RequestMeter, open_request: OpenRequest
    ) -> Problem | None:
        """Answer the request. Return the problem in the answer, None for a whole one."""
        record, is_answered = incoming.record, True
        try:
            generation = self._generation(request, incoming, meter)
            open_request.check_time = generation.check_time
            self._service.availability.admit(generation.context)
            try:
                failure = await generation.run(self._reply(generation, incoming))
            finally:
                self._service.availability.leave(generation.context)
                usage = generation.usage
                meter.add_prompts(usage)
                if (held := incoming.caller.held) is not None:
                    held.spend(anyio.current_time(), usage.prompt_tokens + usage.completion_tokens)
                if record.span.is_recording:
                    answer_id, reasons = self._api.id_prefix + record.id, meter.finish_reasons
                    record.span.annotate(
                        answer_attributes(answer_id, request.model, usage, reasons, meter.first_tokens_s)
                    )
        except ClientDisconnect:
            return CLIENT_GONE
        except Exception as failed:
            failure, is_answered = failed, False
        if failure is None:
            return None
        problem = self._explain(failure)
        _drop_tracebacks(failure)
        if is_answered:
            record.report(problem)
        else:
            await self._reply_problem(incoming, problem)
        return problem

    def _generation(self, request: OpenAIRequest, incoming: _Incoming, meter: RequestMeter) -> Generation:
        """Return the generation of a valid request. Raise what refuses it."""
        record, service = incoming.record, self._service
        model = self._find_model(request)
        metadata = record.headers.metadata(service.options.limits)
        record.context = context = Context(request, id=record.id, metadata=metadata)
        record.span.attach(context, record.headers.values)
        record.drop_headers()
        prompts: list[OpenAIRequest] = [request]
        if has_prompts(request):  # validated here: the graph sees the prompts one by one
            self._validate(request)
            prompts = one_per_prompt(request)
        if record.span.is_recording:
            record.span.annotate(request_attributes(request, self._api.endpoint, len(prompts)))
        return Generation(
            model.graph,
            context,
            prompts,
            UsageCount(meter, len(prompts)),
            meter,
            service.availability,
            RequestClock(service.time_limits, meter.started_s),
            incoming.receive,
            record.scope.get(ON_GONE),
            task_starter(),
        )

    def _reply(self, generation: Generation, incoming: _Incoming) -> Reply:
        """Return the reply in the form that the request wants."""
        api, options, request = self._api, self._service.options, generation.context.payload
        form = AnswerForm.of(
            request,
            id=api.id_prefix + generation.context.id,
            created=int(time.time()),
            prompts=len(generation.prompts),
            force_usage=options.force_usage,
        )
        send, on_gone, start, usage = incoming.send, generation.lose_client, generation.start, generation.usage
        part = incoming.record.part_writer(send)
        first = None if part is None else incoming.record.write_first
        if request.stream:
            return StreamedReply(
                send,
                STREAM_HEADERS,
                on_gone,
                start,
                options.keep_alive_s,
                api.chunks(form, usage),
                options.overload_status,
                write_first=first,
                write_part=part,
            )
        most_bytes = options.limits.max_whole_answer_bytes or inf
        answer = api.answer(form, usage)
        return WholeReply(
            send, JSON_HEADERS, on_gone, start, None, answer, most_bytes, write_first=first, write_part=part
        )

    # -- errors

    async def _refuse(self, incoming: _Incoming, error: Exception) -> None:
        """Answer a request that has not begun."""
        problem = self._explain(error)
        incoming.record.span.set_result(problem)
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
