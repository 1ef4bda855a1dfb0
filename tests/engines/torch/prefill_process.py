"""A prefill worker as a process of its own, in the deployment at the URL that is its argument, until its input ends.

python -m tests.engines.torch.prefill_process file:FOLDER
"""

from __future__ import annotations

import sys

import anyio

from engines import DisaggregationMode, Worker, WorkerConfig
from engines.torch import PeerHandover, TorchEngine, TorchSettings
from pipeline.network import Runtime

from .tiny_model import loader


async def main(url: str) -> None:
    """Serve prompts."""
    settings = TorchSettings(role="prefill", block_size_tokens=8, kv_cache_blocks=2048)
    engine = TorchEngine(loader(), settings, handover=PeerHandover(prefills=True))
    config = WorkerConfig(namespace="ns", component="prefill", disaggregation_mode=DisaggregationMode.PREFILL)
    async with Runtime.at(url) as runtime, Worker(engine, config, runtime=runtime):
        await anyio.to_thread.run_sync(sys.stdin.read)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1])
