"""The whole graph: prefill here, decode there, KV-aware routing, and what happens when a worker breaks.

python examples/whole_graph.py
"""

from __future__ import annotations

import logging
import sys
from contextlib import AsyncExitStack

from engines import DisaggregationMode, as_engine
from engines.mocker import MockEngine, MockEngineArgs, TransferExchange, transfer_order
from operators import Detokenize, KvPrefill, KvPushRouter, Migration, Model, PrefillRouter, Preprocess, PushRouter
from operators.kv import KvRouterConfig, kv_router
from pipeline import Context
from pipeline.network import static_workers
from pipeline.protocols.openai import ChatCompletionRequest, ChatMessage
from pipeline.rx import AnyIOScheduler
from pipeline.testing import Faults, run_in_virtual_time
from serving.deployment import StandardGraph

exchange = TransferExchange(transfer_order("vllm"))
engines = [
    as_engine(MockEngine(args, exchange=exchange, token_ids=range(97, 123)), mode=DisaggregationMode(args.worker_type))
    for args in (MockEngineArgs(worker_type="prefill"), MockEngineArgs(worker_type="decode"))
    for _ in range(2)
]

# The graph, in twenty lines.
model = Model.byte_level("mock")
settings = KvRouterConfig(use_kv_events=False)
prefill_workers = static_workers({0: engines[0], 1: engines[1]}, name="prefill")
decode_workers = static_workers({2: engines[2], 3: engines[3]}, name="decode")
prefill_router = kv_router(prefill_workers, settings, block_size_tokens=64, worker_type="prefill")
router = kv_router(decode_workers, settings, block_size_tokens=64, worker_type="decode")


def declared(scheduler: AnyIOScheduler) -> StandardGraph:
    stage = KvPushRouter(prefill_router)
    push = PushRouter(prefill_workers)
    prefill = PrefillRouter(KvPrefill(stage, stage >> push), push.health.changes(), scheduler=scheduler)
    text = Preprocess(model) >> Migration(limit=3) >> Detokenize(model)
    return text >> prefill >> KvPushRouter(router) >> PushRouter(decode_workers)


async def main() -> None:
    async with AsyncExitStack() as opened:
        scheduler = await opened.enter_async_context(AnyIOScheduler())
        for engine in engines:
            await opened.enter_async_context(engine)
        graph = declared(scheduler)
        print(graph.draw("text"))
        broken = graph.insert_before(KvPushRouter, Faults(disconnect_after=5, times=1))
        for each in (graph, broken):
            chat = ChatCompletionRequest(model="mock", messages=[ChatMessage(role="user", content="hi")], max_tokens=20)
            async with await each.generate(Context(chat)) as stream:
                print("".join([item.data.text or "" async for item in stream if item.data is not None]))


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    run_in_virtual_time(main)
