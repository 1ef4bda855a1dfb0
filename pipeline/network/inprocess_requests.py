"""The request plane of one process: a function call."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from pipeline import AsyncEngine, Context, Disconnected, InvalidArgument, Once, PenstockError, ResponseStream, to_error
from pipeline.foreign import raise_if_ours

from .call_meter import CallMeter, MeteredCall
from .names import Instance
from .request_plane import RequestPlane, Serving, not_found

if TYPE_CHECKING:
    from pipeline.metrics import Metrics

Out = TypeVar("Out")


class InProcessRequestPlane(RequestPlane):
    """Instances of one process, by their full identity. Payloads are handed over as they are, not copied.

    `metrics`, of the component family, count the requests of each instance.
    """

    def __init__(self, metrics: Metrics | None = None) -> None:
        self._metrics = metrics
        self.serving: dict[str, InProcessServing] = {}

    async def serve(self, instance: Instance, engine: AsyncEngine[Any, Any]) -> tuple[Instance, Serving]:
        if instance.key in self.serving:
            raise InvalidArgument(f"{instance} is served already", field="instance_id")
        meter = None if self._metrics is None else CallMeter(self._metrics, instance)
        serving = self.serving[instance.key] = InProcessServing(self, instance, engine, meter)
        return instance, serving

    def engine(self, instance: Instance, item_type: type[Out]) -> AsyncEngine[Any, Out]:
        return _InstanceEngine(self, instance)

    async def close(self) -> None:
        for serving in list(self.serving.values()):
            serving.cut()


class InProcessServing(Serving):
    """Runs each request under a context of its own, so that the engine may be killed and its caller not."""

    def __init__(
        self,
        plane: InProcessRequestPlane,
        instance: Instance,
        engine: AsyncEngine[Any, Any],
        meter: CallMeter | None,
    ) -> None:
        self._plane = plane
        self._instance = instance
        self._engine = engine
        self._meter = meter
        self._calls: dict[Context[Any], None] = {}  # in the order they came, which is that in which they are cut
        self._is_cut = False
        self._idle = anyio.Event()

    @property
    def running(self) -> int:
        return len(self._calls)

    def refuse(self) -> None:
        if self._plane.serving.get(self._instance.key) is self:
            del self._plane.serving[self._instance.key]

    async def drained(self) -> None:
        while self._calls:
            await self._idle.wait()

    def cut(self) -> None:
        self.refuse()
        self._is_cut = True
        for call in list(self._calls):
            call.kill()

    async def take(self, request: Context[Any]) -> ResponseStream[Any]:
        """The engine's answer, relayed."""
        call = Context(request.payload, id=request.id, metadata=request.metadata)
        call.trace = request.trace
        request.control.link_child(call.control)
        if not self._calls:
            self._idle = anyio.Event()
        self._calls[call] = None
        metered = None if self._meter is None else self._meter.begun(request.payload)
        ended = Once(self._end, call, request, metered)
        try:
            stream = await self._ask(call, request)
        except BaseException:
            ended.release()
            raise
        return ResponseStream(self._relay(stream, request, ended, metered), request, stream, ended)

    async def _ask(self, call: Context[Any], request: Context[Any]) -> ResponseStream[Any]:
        try:
            return await self._engine.generate(call)
        except BaseException as error:
            raise_if_ours(error)
            self._fail(request, error)
            raise

    async def _relay(
        self, stream: ResponseStream[Any], request: Context[Any], ended: Once, metered: MeteredCall | None
    ) -> AsyncGenerator[Any, None]:
        try:
            async with stream:
                async for item in stream:
                    if metered is not None:
                        try:  # noqa: SIM105  # 40 ns an item; any other way to look for tokens costs more
                            metered.tokens += len(item.data.token_ids)
                        except (AttributeError, TypeError):
                            pass
                    yield item
            if self._is_lost_to(request):
                raise self._lost()
        except BaseException as error:
            raise_if_ours(error)
            self._fail(request, error)
            raise
        finally:
            ended.release()

    def _is_lost_to(self, request: Context[Any]) -> bool:
        """Whether the instance went away under a request that still wants an answer."""
        return self._is_cut and not request.is_stopped

    def _lost(self) -> Disconnected:
        return Disconnected(f"{self._instance} was lost")

    def _fail(self, request: Context[Any], error: BaseException) -> None:
        """Counts the error, and raises what the caller gets in its place, if it is not the error itself."""
        if self._meter is not None:
            self._meter.failed()
        if self._is_lost_to(request) and not isinstance(error, Disconnected):
            raise self._lost() from error
        if not isinstance(error, PenstockError):
            raise to_error(error) from error

    def _end(self, call: Context[Any], request: Context[Any], metered: MeteredCall | None) -> None:
        self._calls.pop(call, None)
        if self._meter is not None and metered is not None:
            self._meter.ended(metered, cancelled=request.is_stopped)
        if not self._calls:
            self._idle.set()


class _InstanceEngine(AsyncEngine[Any, Any]):
    """One instance, seen from its callers."""

    def __init__(self, plane: InProcessRequestPlane, instance: Instance) -> None:
        self._plane = plane
        self._instance = instance

    def __str__(self) -> str:
        return str(self._instance)

    async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
        serving = self._plane.serving.get(self._instance.key)
        if serving is None:
            raise not_found(str(self._instance.endpoint_id), self._instance.instance_id)
        return await serving.take(request)
