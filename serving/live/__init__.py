"""A running server as an engine: requests in tokens to an OpenAI-compatible API over HTTP.

    report = await run(live_graph("http://10.0.0.5:8000"), read_trace(path).with_vocabulary(range(1000, 32_000)))

`LiveEngine` uses `POST /v1/completions`, `find_server` finds the model, `live_graph` does both for
`serving.replay.run`, and `replay_live` is the whole replay as `penstock replay --live` does it.
"""

from pipeline.extras import brought_by

with brought_by("serve", by=__name__):
    from engines.upstream import Address as Address

    from .engine import LiveEngine, find_server, live_graph
    from .live_replay import replay_live

__all__ = ["LiveEngine", "find_server", "live_graph", "replay_live"]
