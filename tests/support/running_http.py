"""A real HTTP API on port 0 in front of a gateway, for the tests of one event loop, with clients that call it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
from openai import AsyncOpenAI

from bottega.http.config import HttpConfig
from bottega.http.server import HttpServer
from bottega.rpc.server_config import HttpServerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """An HTTP API that serves, OpenAI's own client of it, and a plain one."""

    server: HttpServer
    openai: AsyncOpenAI
    http: httpx.AsyncClient

    @property
    def url(self) -> str:
        return f"http://{self.server.address}"

    async def metrics(self) -> str:
        return (await self.http.get(f"http://{self.server.addresses['metrics']}/metrics")).text


@contextlib.asynccontextmanager
async def running_http(
    gateway: str, *, api_key: str = "none", server: dict[str, Any] | None = None, **config: Any
) -> AsyncIterator[Door]:
    """Serve until the block ends. server: keys of the configuration's section of that name."""
    section = HttpServerConfig(**{"listen": "127.0.0.1:0", "drain_grace_s": 5.0, **(server or {})})
    served = HttpServer(HttpConfig(gateway=gateway, server=section, **{"fleet": "", **config}))
    await served.start()
    try:
        await served.check_gateway()
        url = f"http://{served.address}"
        shown = {"authorization": f"Bearer {api_key}"}
        async with (
            AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=30.0) as openai,
            httpx.AsyncClient(base_url=url, headers=shown, timeout=30.0) as http,
        ):
            yield Door(server=served, openai=openai, http=http)
    finally:
        await served.stop()
        await served.close()
