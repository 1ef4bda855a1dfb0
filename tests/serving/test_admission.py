"""Which instances of an endpoint a graph may use."""

from __future__ import annotations

from typing import Any

from pipeline.network import EndpointId, Instance, Runtime
from pipeline.network.discovery import Added, Removed
from pipeline.testing import ScriptedEngine
from serving.deployment.admission import Admission
from tests.pipeline.network.worlds import watchers

WHERE = EndpointId("ns", "backend", "generate")


def seen(admission: Admission, runtime: Runtime) -> tuple[list[tuple[type, int]], Any]:
    """The changes that a subscriber receives, which grow, and the subscription."""
    received: list[tuple[type, int]] = []

    def note(change: Added[Instance] | Removed[Instance]) -> None:
        received.append((type(change), change.item.instance_id))

    return received, admission.instances(runtime, WHERE).subscribe(note)


async def test_an_instance_is_seen_once_it_is_there_and_admitted() -> None:
    admission = Admission()
    async with Runtime.in_process() as runtime:
        received, subscription = seen(admission, runtime)
        admission.admit([1])
        one = await runtime.serve(WHERE, ScriptedEngine([]), instance_id=1)
        await runtime.serve(WHERE, ScriptedEngine([]), instance_id=2)
        assert received == [(Added, 1)]
        admission.admit([2, 1])
        admission.admit([1, 2])
        assert received == [(Added, 1), (Added, 2)]
        await one.withdraw()
        assert received[2:] == [(Removed, 1)]
        admission.admit([])
        assert received[3:] == [(Removed, 2)]
        late, other = seen(admission, runtime)
        admission.admit([2])
        assert (received[4:], late) == ([(Added, 2)], [(Added, 2)])
        for each in (subscription, other):
            each.dispose()
        assert watchers(runtime) == 0
        admission.admit([])
        assert len(late) == 1


async def test_it_ends_with_the_runtime() -> None:
    ended: list[str] = []
    async with Runtime.in_process() as runtime:
        Admission().instances(runtime, WHERE).subscribe(lambda _: None, on_completed=lambda: ended.append("end"))
    assert ended == ["end"]
