"""What a user would write in place of our proxy: prefill, then decode, by aiohttp's server and client, with no check of anything.

python -m expertwire.cli.bench.proxy_aiohttp PORT PREFILL_URL DECODE_URL
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

ASKED = {"do_remote_decode": True, "do_remote_prefill": False}


def main(port: int, prefill: str, decode: str) -> None:
    """Serve until a signal ends the process; on uvloop, as `expertwire proxy`."""
    import uvloop
    from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

    async def handle(request: web.Request) -> web.StreamResponse:
        session: ClientSession = request.app["session"]
        body: dict[str, Any] = await request.json()
        headers = {"Authorization": request.headers.get("Authorization", "")}
        first = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": ASKED}
        async with session.post(prefill + request.path, json=first, headers=headers) as answer:
            found = await answer.json()
        body["kv_transfer_params"] = found["kv_transfer_params"]
        async with session.post(decode + request.path, json=body, headers=headers) as answer:
            if not body.get("stream"):
                return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]})
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/{path:.*}", handle)
        async with ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout(total=None), json_serialize=json.dumps) as session:
            app["session"] = session
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
            await asyncio.Event().wait()

    uvloop.run(serve())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
