"""Names across processes: namespace, component and endpoint, and the instances that serve one.

Source: dynamo lib/runtime/src/component.rs, protocols.rs EndpointId. Other than there, the default names are valid.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, Self

from attrs import field, frozen

from pipeline import InvalidArgument
from pipeline.protocols.field_rules import U64

DEFAULT_NAMESPACE, DEFAULT_COMPONENT, DEFAULT_ENDPOINT = "NS", "C", "E"
SCHEME = "dyn://"
MAX_ID = 2**53 - 1
"""Ids are drawn up to here, so that they survive readers that hold numbers as doubles."""

DeviceType = Literal["cpu", "cuda"]

_NAME = re.compile(r"[a-z0-9_-]+")
_SEPARATORS = re.compile(r"[/.]")
_NO_CUDA = {"", "-1", "none", "void"}
_NO_NVIDIA = {"none", "void"}


def check_name(kind: str, name: str) -> str:
    """Return the name itself. Raise InvalidArgument unless it is of lower-case letters, digits, `-` and `_`."""
    if name not in (DEFAULT_NAMESPACE, DEFAULT_COMPONENT) and not _NAME.fullmatch(name):
        raise InvalidArgument(f"{kind} {name!r} must consist of a-z, 0-9, - and _", field=kind)
    return name


@frozen(order=True)
class EndpointId:
    """Where something is served. A nested namespace is written `parent.child`."""

    namespace: str = DEFAULT_NAMESPACE
    component: str = DEFAULT_COMPONENT
    endpoint: str = DEFAULT_ENDPOINT

    @classmethod
    def parse(cls, text: str | EndpointId) -> EndpointId:
        """From `ns/comp/ep`, with `.` for `/` anywhere and `dyn://` before it if wanted.

        Blanks around are ignored and empty parts take their defaults. One part alone is the component, two are
        namespace and component, and what is beyond three joins the endpoint with `_`.
        """
        if isinstance(text, EndpointId):
            return text
        parts = [part.strip() for part in _SEPARATORS.split(text.strip().removeprefix(SCHEME))]
        if len(parts) == 1:
            parts.insert(0, "")
        namespace, component, *endpoint = parts
        return cls(
            namespace or DEFAULT_NAMESPACE,
            component or DEFAULT_COMPONENT,
            "_".join(filter(None, endpoint)) or DEFAULT_ENDPOINT,
        )

    def checked(self) -> EndpointId:
        """This id. Raise InvalidArgument for a namespace or component that cannot be one, and for an empty endpoint,
        whose name is otherwise free."""
        for part in self.namespace.split("."):
            check_name("namespace", part)
        check_name("component", self.component)
        if not self.endpoint:
            raise InvalidArgument("the endpoint has no name", field="endpoint")
        return self

    @property
    def path(self) -> str:
        """`ns/comp/ep`: the key under which its instances, and no others, are stored."""
        return f"{self.namespace}/{self.component}/{escaped(self.endpoint)}"

    def __str__(self) -> str:
        return f"{SCHEME}{self.namespace}.{self.component}.{self.endpoint}"


@frozen
class Instance:
    """One live server of an endpoint, as discovery knows it.

    Only the four names together identify it: all endpoints of one process share the instance id. `transport` is how
    to reach it, by the name of the request plane; the codec is None where the reader's default holds.
    """

    namespace: str
    component: str
    endpoint: str
    instance_id: U64
    transport: Mapping[str, str] = field(factory=dict, hash=False)
    device_type: DeviceType | None = None
    request_plane_codec: Literal["json", "msgpack"] | None = None

    @classmethod
    def of(cls, endpoint: EndpointId, instance_id: int, *, device_type: DeviceType | None = None) -> Self:
        """Return an instance of the endpoint."""
        return cls(endpoint.namespace, endpoint.component, endpoint.endpoint, instance_id, device_type=device_type)

    @property
    def endpoint_id(self) -> EndpointId:
        return EndpointId(self.namespace, self.component, self.endpoint)

    @property
    def key(self) -> str:
        """`ns/comp/ep/<id in hex>`: unique, and what it is stored under."""
        return instance_key(self.endpoint_id, self.instance_id)

    def __str__(self) -> str:
        return f"{self.endpoint_id.path}/{self.instance_id}"


def instance_key(endpoint: EndpointId, instance_id: int) -> str:
    """`ns/comp/ep/<id in hex>`."""
    return f"{endpoint.path}/{instance_id:x}"


def escaped(name: str) -> str:
    """Return the name as one part of a key, where a slash would begin another."""
    return name.replace("%", "%25").replace("/", "%2F")


def matches_prefix(key: str, prefix: str) -> bool:
    """Return whether the key is below the prefix, by whole parts between slashes; all are below the empty one."""
    return not prefix or f"{key}/".startswith(f"{prefix.removesuffix('/')}/")


def detect_device_type(environment: Mapping[str, str]) -> DeviceType:
    """`cpu` where the environment hides every GPU from the process, else `cuda`."""
    cuda, nvidia = environment.get("CUDA_VISIBLE_DEVICES"), environment.get("NVIDIA_VISIBLE_DEVICES")
    hidden = (cuda is not None and cuda.strip() in _NO_CUDA) or (nvidia is not None and nvidia.strip() in _NO_NVIDIA)
    return "cpu" if hidden else "cuda"
