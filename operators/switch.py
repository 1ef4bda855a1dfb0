"""Switch: several graphs behind one, chosen by the model that a request names.

request.model ──► "llama"    ──► its graph
              ├─► "qwen"     ──► its graph
              ├─► "gemma"    ──► awaited: Unavailable
              └─► any other  ──► ModelNotFound
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Protocol, TypeVar

from pipeline import AsyncEngine, Context, InvalidArgument, ResponseStream, Stage, Unavailable
from pipeline.errors import StatusError

AWAITED_MAX = 1000
"""Names of models that are awaited; of more the oldest are forgotten."""


class NamesModel(Protocol):
    """A request for one of several models."""

    @property
    def model(self) -> str:
        """The name of the model."""
        ...


In_contra = TypeVar("In_contra", bound=NamesModel, contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)


class ModelNotFound(StatusError):
    """The request names a model that is not served."""

    def __init__(self, message: str = "Model not found", *, status: int = 404, cause: BaseException | None = None):
        super().__init__(message, status=status, cause=cause)


class Switch(AsyncEngine[In_contra, Out_co]):
    """Sends each request to the graph of the model that it names.

        request ──► the graph of `request.model`, unchanged
        stream  ◄── that graph's own, at no cost

    Ends a graph; stages above it are shared by all models, and those of one model stand in its own graph. A graph may
    have several names. Graphs come and go with `add` and `remove` while requests run: a request stays with the graph
    that took it. The switch neither opens nor closes graphs; close one once it is removed and its requests have ended.

    Raises ModelNotFound, an HTTP status of 404, for a model that is not served, and Unavailable, one of 503, for one
    that is awaited, see `expect`.

    Source: dynamo lib/llm/src/discovery/model_manager.rs, ModelManager. Other than there, it is a stage, so that a
    graph above it is checked and drawn with the graphs below.
    """

    adds_time = False

    def __init__(self, graphs: Mapping[str, AsyncEngine[In_contra, Out_co]] = MappingProxyType({})) -> None:
        """Begin with these graphs by name; raise as `add`."""
        self._graphs: dict[str, AsyncEngine[In_contra, Out_co]] = {}
        self.graphs: Mapping[str, AsyncEngine[In_contra, Out_co]] = MappingProxyType(self._graphs)
        """The graphs by model name as they are now, in the order in which they came."""
        self._awaited: dict[str, None] = {}
        self.awaited: Collection[str] = self._awaited.keys()
        """The names of models that are expected."""
        for name, graph in graphs.items():
            self.add(name, graph)

    def add(self, name: str, graph: AsyncEngine[In_contra, Out_co]) -> None:
        """Send requests for this model to the graph. Raise InvalidArgument for an empty name, or one that is taken."""
        if not name.strip():
            raise InvalidArgument("must not be empty", field="model")
        if name in self._graphs:
            raise InvalidArgument(f"{name!r} is served already", field="model")
        self._graphs[name] = graph
        self._awaited.pop(name, None)

    def remove(self, name: str) -> None:
        """Send no more requests to the graph of this model. Raise InvalidArgument if there is none."""
        if name not in self._graphs:
            raise InvalidArgument(f"{name!r} is not served", field="model")
        del self._graphs[name]

    def expect(self, name: str) -> None:
        """Refuse requests for this model as Unavailable until it has a graph; nothing changes if it has one."""
        if name not in self._graphs:
            self._awaited[name] = None
            if len(self._awaited) > AWAITED_MAX:
                del self._awaited[next(iter(self._awaited))]

    async def generate(self, request: Context[In_contra]) -> ResponseStream[Out_co]:
        graph = self._graphs.get(request.payload.model)
        if graph is None:
            if request.payload.model in self._awaited:
                raise Unavailable(f"no worker of {request.payload.model!r} is there now")
            raise ModelNotFound
        return await graph.generate(request)

    def branches(self) -> Mapping[str, Stage]:
        return self._graphs
