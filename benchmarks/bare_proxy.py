"""A proxy of a few lines that reads nothing of what it passes on: the floor of one in Python. Needs aiohttp.

python bare_proxy.py PORT UPSTREAM_URL ...
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import ClientSession, TCPConnector, web  # pyright: ignore[reportMissingImports]

PORT, URLS = int(sys.argv[1]), itertools.cycle(sys.argv[2:])


async def client(app: Any) -> AsyncIterator[None]:
    async with ClientSession(connector=TCPConnector(limit=0)) as app["client"]:
        yield


async def pass_on(request: Any) -> Any:
    body, kind = await request.read(), {"content-type": request.content_type}
    sent = request.app["client"].request(request.method, next(URLS) + request.path, data=body, headers=kind)
    async with sent as answer:
        passed = web.StreamResponse(status=answer.status, headers={"content-type": answer.headers["content-type"]})
        await passed.prepare(request)
        async for data in answer.content.iter_any():
            await passed.write(data)
        await passed.write_eof()
    return passed


app = web.Application()
app.cleanup_ctx.append(client)
app.router.add_route("*", "/{path:.*}", pass_on)
web.run_app(app, host="127.0.0.1", port=PORT, print=None)
