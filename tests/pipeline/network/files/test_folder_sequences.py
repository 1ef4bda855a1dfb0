"""Any sequence of writes and faults: afterwards all processes agree, and each key alive is held by exactly one."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import anyio
import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import Unavailable
from pipeline.network.files import FileStore
from tests.pipeline.network.files.worlds import Deployment, keys_of
from tests.pipeline.network.worlds import TTL_S, record_watch

KEYS = ("a/1", "a/2", "b/1")
STORES = 3


@frozen
class Step:
    what: str
    store: int
    key: str
    pause_s: float


STEPS = st.builds(
    Step,
    st.sampled_from(
        [
            *("create", "create", "replace", "replace", "delete", "abandon", "entries"),
            *("stop", "go on", "cut", "mend", "damage", "empty", "remove", "set clock"),
        ]
    ),
    st.integers(0, STORES - 1),
    st.sampled_from(KEYS),
    st.sampled_from([0.0, 0.0, 0.1, 1.0, TTL_S / 2, TTL_S + 1, 3 * TTL_S]),
)


async def write(store: FileStore, step: Step, number: int) -> None:
    """Write as discovery does; without the folder it fails."""
    with suppress(Unavailable):
        if step.what == "create":
            await store.create(step.key, b"%d" % number)
        elif step.what == "delete":
            await store.delete(step.key)
        elif step.what == "entries":
            await store.entries()
        elif (known := await store.get(step.key)) is not None:
            await store.replace(step.key, b"%d" % number, known.revision)


def fault(deployment: Deployment, store: FileStore, step: Step) -> None:
    if step.what == "stop" and store._calls not in deployment.stopped:
        deployment.stop(store)
    elif step.what == "go on" and store._calls in deployment.stopped:
        deployment.go_on(store)
    elif step.what == "cut":
        deployment.cut(store)
    elif step.what == "mend":
        deployment.mend()
    elif step.what == "abandon":
        store.abandon(step.key)
    elif step.what == "damage":
        for path in deployment.records.glob("a*"):
            path.write_bytes(b"garbage")
    elif step.what in ("empty", "remove"):
        part = deployment.path / ("records", "leases", "work")[step.store]
        shutil.rmtree(part if step.what == "empty" else deployment.path, ignore_errors=True)
    elif step.what == "set clock":
        deployment.offset_ns += round((step.pause_s - TTL_S) * 1e9)


async def run(deployment: Deployment, steps: list[Step]) -> None:
    async with deployment.store() as first, deployment.store() as second, deployment.store() as third:
        stores = (first, second, third)
        watched = [record_watch(store)[0] for store in stores]
        async with anyio.create_task_group() as tasks:
            for number, step in enumerate(steps):
                if step.what in ("create", "replace", "delete", "entries"):
                    tasks.start_soon(write, stores[step.store], step, number)
                else:
                    fault(deployment, stores[step.store], step)
                await anyio.sleep(step.pause_s)
            deployment.mend()
            for store in stores:
                fault(deployment, store, Step("go on", 0, "", 0))
        await first.create("end", b"")  # a folder that is gone is made again for those with keys
        await anyio.sleep(6 * TTL_S)

        held = {key: put.value for store in stores for key, put in store._own.items()}
        assert sum(len(store._own) for store in stores) == len(held)
        for store, received in zip(stores, watched, strict=True):
            assert await store.entries() == held
            assert keys_of(received) == held
            assert not store._dropping


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(STEPS, max_size=40))
async def test_after_any_sequence_all_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[Step]) -> None:
    with monkeypatch.context() as patch:
        deployment = Deployment(tmp_path / uuid4().hex)
        deployment.patch(patch)
        await run(deployment, steps)
