"""An OpenAI-compatible ASGI app over any engine; any server runs it, any other app mounts it.

    app(graph)                                   one graph, under its model's name
    app({"llama": graph, "echo": other})         several
    app(Switch({"llama": graph}))                several, which may come and go: see operators.Switch

Source: dynamo lib/llm/src/http/service/{service_v2,openai,health,metrics}.rs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from attrs import evolve
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pipeline.protocols.openai import ModelList
from pipeline.telemetry import Tracer
from pipeline.wire import to_json

from ..openai import encode
from ..problems import Problem, Refusal
from .caller import caller_of
from .edge import DirectRoutes, Edge, Handlers, TracedEndpoint
from .generation import CHAT, COMPLETIONS, Api, GenerationEndpoint
from .guard import Access
from .metrics import Telemetry
from .open_requests import Availability, Phase
from .openapi import describe, page
from .options import HttpOptions
from .request import RequestRecord
from .service import Graph, Service, served


def app(
    graph: Graph | Mapping[str, Graph],
    *,
    options: HttpOptions | None = None,
    availability: Availability | None = None,
    telemetry: Telemetry | None = None,
    tracer: Tracer | None = None,
    access: Access | None = None,
) -> Edge:
    """Return the app of one graph, or of several by model name.

    It owns nothing but its counters: it neither opens nor closes graphs, and needs no lifespan. A program that drains
    passes its `availability`; metrics go to `telemetry`, by default one of the app's own. With a `tracer` each
    generation has a span, the parent of the spans of a `traced` graph. `access` decides who may use the app, by
    default every client.
    Raise ValueError for a single graph without a model in it: pass it with a name.
    """
    service = Service(
        models=served(graph),
        options=options or HttpOptions(),
        availability=availability or Availability(),
        telemetry=telemetry or Telemetry(),
    )
    routes = _routes(service, tracer)
    direct = {route.path: route.app for route in routes if isinstance(route.app, GenerationEndpoint | TracedEndpoint)}
    middleware = [*(access or Access()).middleware(service.options), Middleware(DirectRoutes, paths=direct)]
    return _application(service, routes, middleware)


def admin_app(
    graph: Graph | Mapping[str, Graph], options: HttpOptions, availability: Availability, telemetry: Telemetry
) -> Edge:
    """Return the app of the admin address: metrics and the state of the graph's workers, for every client of it."""
    service = Service(served(graph), evolve(options, shows_internals=True), availability, telemetry)
    return _application(service, _state_routes(_Pages(service), service.options), [])


def _application(service: Service, routes: Sequence[Route], middleware: Sequence[Middleware]) -> Edge:
    handlers: Handlers = {HTTPException: _unroutable, Refusal: _refused}
    return Edge(routes, handlers, service.options, service.telemetry.refusals, middleware)


def _routes(service: Service, tracer: Tracer | None) -> list[Route]:
    pages, options = _Pages(service), service.options

    def generation(path: str, api: Api) -> Route:
        endpoint = GenerationEndpoint(service, api)
        return Route(path, endpoint if tracer is None else TracedEndpoint(endpoint, path, tracer), methods=["POST"])

    return [
        generation(options.chat_path, CHAT),
        generation(options.completions_path, COMPLETIONS),
        Route(options.models_path, pages.models),
        Route(options.models_path + "/{id:path}", pages.model),
        Route(options.openapi_path, pages.openapi),
        Route(options.docs_path, pages.docs),
        *_state_routes(pages, options),
    ]


def _state_routes(pages: _Pages, options: HttpOptions) -> list[Route]:
    """Return the routes of the server's own state; metrics only where its internals are shown."""
    routes = [Route(options.health_path, pages.health), Route(options.live_path, pages.live)]
    return [*routes, Route(options.metrics_path, pages.metrics)] if options.shows_internals else routes


class _Pages:
    """The pages around the two generation APIs."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @cached_property
    def _description(self) -> bytes:
        return encode(describe(self._service.options))

    @cached_property
    def _docs(self) -> bytes:
        return page(describe(self._service.options), self._service.options.openapi_path)

    async def openapi(self, request: Request) -> Response:
        """The description of the app, made for the first request."""
        return _json(self._description)

    async def docs(self, request: Request) -> Response:
        """The description as a page."""
        return Response(self._docs, media_type="text/html")

    async def models(self, request: Request) -> Response:
        """All models that the caller may use."""
        caller, models = caller_of(request.scope), self._service.models
        infos = [model.info(self._service.options) for name, model in models.items() if caller.may_use(name)]
        return _json(to_json(ModelList(infos)))

    async def model(self, request: Request) -> Response:
        """One model; with `/ready` behind its name, whether it is ready. Names may have slashes; an exact name wins."""
        name, caller = request.path_params["id"], caller_of(request.scope)
        if (model := self._service.models.get(name)) is not None and caller.may_use(name):
            return _json(to_json(model.info(self._service.options)))
        model_name = name.removesuffix("/ready")
        if model_name != name and model_name in self._service.models and caller.may_use(model_name):
            return _json(encode({"model": model_name, "namespaces": {}}))
        raise Refusal(404, "Model not found")

    async def health(self, request: Request) -> Response:
        """200 while requests are taken, even without workers, which it lists if they are shown; 503 while draining, and
        before there is any model."""
        phase = self._service.availability.phase
        if phase is Phase.READY and self._service.models:
            if not (self._service.options.shows_internals and caller_of(request.scope).may("admin")):
                return _json(encode({"status": "healthy"}))
            roles = self._service.instances()
            instances = sorted({instance for those in roles.values() for instance in those})
            endpoints = sorted({instance.rpartition("/")[0] for instance in instances})
            state = {"status": "healthy", "endpoints": endpoints, "instances": instances, "roles": roles}
            return _json(encode(state))
        stage = "no_model" if phase is Phase.READY else phase.value
        body = {"status": "not_ready", "stage": stage, "message": "Service is not ready"}
        return _json(encode(body), 503)

    async def live(self, request: Request) -> Response:
        """200 until the program stops, even while it drains."""
        stopping = self._service.availability.phase is Phase.STOPPING
        return _json(encode({"status": "stopping" if stopping else "live"}), 503 if stopping else 200)

    async def metrics(self, request: Request) -> Response:
        """All metrics as Prometheus text. Raise Refusal (403) for a key without the privilege `admin`."""
        if not caller_of(request.scope).may("admin"):
            raise Refusal(403, "metrics need a key with the privilege `admin`")
        telemetry = self._service.telemetry
        return Response(telemetry.text(), media_type=telemetry.media_type)


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")


def _problem(request: Request, problem: Problem) -> Response:
    record = RequestRecord.of(request.scope)
    record.report(problem)
    response = _json(problem.body(record.id), problem.status)
    response.raw_headers.extend(problem.headers())
    return response


async def _unroutable(request: Request, error: Exception) -> Response:
    """Answer a path that does not exist, or does not have this method; a header lists its methods."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return _problem(request, Problem(404, f"Route not found: {request.method} {request.url.path}", "not_found"))
    response = _problem(request, Problem(error.status_code, "Method not allowed", "validation"))
    response.headers.update(error.headers or {})
    return response


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return _problem(request, error.problem)
