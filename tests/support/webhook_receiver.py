"""A receiver of webhooks: a real HTTP server on port 0, which verifies signatures and answers as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from standardwebhooks import Webhook, WebhookVerificationError
from starlette.requests import Request
from starlette.responses import Response

from bottega.gateway.config import WebhooksConfig
from bottega.rpc.security.tenant_file import new_webhook_secret
from tests.support.running_gateway import Running, running_gateway

SECRET = new_webhook_secret()
"""Secret of the gateways of `delivering`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A verified delivery."""

    event_id: str
    type: str
    data: dict[str, Any]
    headers: dict[str, str]
    path: str


@dataclass(slots=True, kw_only=True)
class Receiver:
    """What came, and how to answer. answer: gives the status; hold: answers wait for it; refused: wrong signatures."""

    port: int
    secrets: list[str]
    answer: Callable[[Delivery], int] = lambda _: 204
    headers: dict[str, str] = field(default_factory=dict)
    hold: asyncio.Event | None = None
    deliveries: list[Delivery] = field(default_factory=list)
    accepted: list[Delivery] = field(default_factory=list)
    refused: int = 0
    active: int = 0
    most_active: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    def counts(self) -> Counter[str]:
        """How often each event was accepted, by ID."""
        return Counter(delivery.event_id for delivery in self.accepted)

    async def handle(self, request: Request) -> Response:
        self.active += 1
        self.most_active = max(self.active, self.most_active)
        try:
            return await self._handle(request)
        finally:
            self.active -= 1

    async def _handle(self, request: Request) -> Response:
        body, headers = await request.body(), dict(request.headers)
        if not any(_verifies(secret, body, headers) for secret in self.secrets):
            self.refused += 1
            return Response(status_code=401)
        payload = json.loads(body)
        delivery = Delivery(
            event_id=headers["webhook-id"],
            type=payload["type"],
            data=payload["data"],
            headers=headers,
            path=request.url.path,
        )
        self.deliveries.append(delivery)
        if self.hold is not None:
            await self.hold.wait()
        status = self.answer(delivery)
        if 200 <= status < 300:
            self.accepted.append(delivery)
        return Response(status_code=status, headers=self.headers)


def _verifies(secret: str, body: bytes, headers: dict[str, str]) -> bool:
    try:
        Webhook(secret).verify(body, headers)
    except WebhookVerificationError:
        return False
    return True


class _Server(uvicorn.Server):
    """A server that leaves the signals of the test's process alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def receiving(*secrets: str, certificate: Path | None = None) -> AsyncIterator[Receiver]:
    """Serve a receiver on loopback until the block ends. secrets: of which one has to have signed. certificate: PEM."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        receiver = Receiver(port=listener.getsockname()[1], secrets=list(secrets))

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await (await receiver.handle(Request(scope, receive)))(scope, receive, send)

        config = uvicorn.Config(
            app, log_level="error", lifespan="off", access_log=False, ssl_certfile=certificate, ssl_keyfile=certificate
        )
        server = _Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield receiver
        finally:
            server.should_exit = server.force_exit = True
            await serving


def allowed(**more: Any) -> WebhooksConfig:
    """Allow receivers on loopback, with short times."""
    times = {"first_retry_s": 0.05, "max_retry_s": 0.2}
    return WebhooksConfig(
        **{"hosts": ("127.0.0.1",), "networks": ("127.0.0.0/8",), "ports": (), "plain_http": True, **times, **more}
    )


def secret_file(folder: Path, *secrets: str) -> str:
    path = folder / "webhook-secrets"
    path.write_text("\n".join(secrets) + "\n")
    path.chmod(0o600)
    return str(path)


@contextlib.asynccontextmanager
async def delivering(tmp_path: Path, *, state: Path | None = None, **webhooks: Any) -> AsyncIterator[Running]:
    """A gateway without tenants that delivers webhooks, with a worker."""
    config = allowed(secrets=secret_file(tmp_path, SECRET), **webhooks)
    async with running_gateway(webhooks=config, state=str(state or tmp_path / "state")) as house:
        await house.worker()
        yield house
