"""The application: its routes, and the checks, limits, metrics and log lines that all requests share."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import Sequence
from email.utils import formatdate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bottega.errors import BottegaError, Unauthenticated
from bottega.http.context import Context, context_of
from bottega.http.errors import CLIENT_LEFT, error_response, on_bottega_error, on_failure, on_http_error, refusal
from bottega.http.gateway import GatewayOpen, bind_key
from bottega.http.limits import PeerLimit
from bottega.http.openai_routes import IMAGE_PATH
from bottega.http.operations import OPERATIONS
from bottega.http.page_routes import is_page
from bottega.rpc.security.api_keys import parse_key, shown_key

# In seconds, from a health check to the longest request that draws.
_SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_OPEN_PATHS = frozenset({"/healthz", "/readyz"})
_RETRY = {"retry-after": "1", "x-should-retry": "true"}

_log = logging.getLogger(__name__)


class HttpMetrics:
    """Metrics of requests: their number by route and status, and their duration."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.in_flight = Gauge("bottega_http_in_flight", "Requests that are being served.", registry=registry)
        self.requests = Counter(
            "bottega_http_requests",
            "Requests by route, method and status; 499 is a client that left.",
            ("route", "method", "status"),
            registry=registry,
        )
        self.seconds = Histogram(
            "bottega_http_seconds",
            "Duration of requests, their streams included.",
            ("route",),
            buckets=_SECONDS_BUCKETS,
            registry=registry,
        )


def application(context: Context, metrics: HttpMetrics, *, keys_only: bool) -> ASGIApp:
    """Return the application.

    Args:
        keys_only: Whether requests without an API key are refused here already.
    """
    app = Starlette(
        routes=[
            Route("/healthz", _healthz, methods=["GET"]),
            Route("/readyz", _readyz, methods=["GET"]),
            *(Route(found.route, found.handler, methods=[found.method]) for found in OPERATIONS),
        ],
        exception_handlers={BottegaError: on_bottega_error, HTTPException: on_http_error, Exception: on_failure},
    )
    app.router.redirect_slashes = False
    app.state.context = context
    return _Guarded(app, context, metrics, keys_only=keys_only)


async def _healthz(_: Request) -> Response:
    return PlainTextResponse("ok\n")


async def _readyz(request: Request) -> Response:
    context = context_of(request)
    if context.draining.is_set():
        return PlainTextResponse("stopping\n", 503)
    if not await context.client.is_serving():
        return PlainTextResponse("the gateway does not answer, or does not serve yet\n", 503)
    return PlainTextResponse("ok\n")


class _Guarded:
    """The application behind the checks and the records that hold for every request."""

    def __init__(self, app: ASGIApp, context: Context, metrics: HttpMetrics, *, keys_only: bool) -> None:
        self._app = app
        self._context = context
        self._config = context.config
        self._metrics = metrics
        self._keys_only = keys_only
        self._requests = PeerLimit(context.config.server.max_requests, context.config.server.peer_share)
        # Around the checks: a preflight has no key, and a page can only read answers that allow its origin.
        self._checked: ASGIApp = self._answer
        if self._config.origins:
            self._checked = CORSMiddleware(
                self._answer,
                allow_origins=self._config.origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["etag", "location", "retry-after", "x-should-retry"],
                max_age=600,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the server has only HTTP, and got {scope['type']}")
        began_s, status = time.monotonic(), CLIENT_LEFT

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"date", formatdate(usegmt=True).encode())]
            await send(message)

        self._metrics.in_flight.inc()
        try:
            await self._checked(scope, receive, send_and_note)
        except asyncio.CancelledError:
            if not self._context.draining.is_set():
                raise
            if status == CLIENT_LEFT:
                stopping = refusal(503, "the service stops; retry", code="stopping", headers=_RETRY)
                await stopping(scope, receive, send_and_note)
        finally:
            self._record(scope, status, time.monotonic() - began_s)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = scope["client"][0] if scope["client"] else ""
        if (refused := self._refused(scope)) is not None:
            await refused(scope, receive, send)
            return
        if not self._requests.take(host):
            busy = "the service serves as many requests as it may; retry"
            await refusal(429, busy, code="queue_full", headers=_RETRY)(scope, receive, send)
            return
        try:
            is_closed = self._keys_only and not _is_open(scope["path"])
            app = (await self._check_callers(scope) if is_closed else None) or self._app
            await app(scope, receive, send)
        finally:
            self._requests.give(host)
            self._context.bodies.release(scope)

    def _refused(self, scope: Scope) -> Response | None:
        """Return the answer to a request of a wrong host, origin or key, and bind the key of another one."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not _is_host(host, self._config.hosts):
            text = f"the service is not called {_clipped(host)}: an operator may add the name to `hosts`"
            return refusal(421, text, code="wrong_host")
        origin = headers.get("origin")
        own = (f"http://{host}", f"https://{host}")
        if origin is not None and origin not in own and origin not in self._config.origins:
            return refusal(403, f"pages of {_clipped(origin)} may not call the service", code="wrong_origin")
        if origin is None and _is_embedded_elsewhere(headers, scope["path"], self._config.origins):
            return refusal(403, "pages of other origins may not call the service", code="wrong_origin")
        authorization = headers.get("authorization", "")
        if self._needs_key(scope) and parse_key(shown_key(authorization)) is None:
            return error_response(Unauthenticated("an API key is needed: Authorization: Bearer KEY"))
        bind_key(authorization)
        return None

    def _needs_key(self, scope: Scope) -> bool:
        """Return whether a request without a key is refused. A picture's URL has the key of its caller."""
        path = scope["path"]
        return self._keys_only and not _is_open(path) and not path.startswith(f"{IMAGE_PATH}/")

    async def _check_callers(self, scope: Scope) -> Response | None:
        """Return the answer to a request whose key the gateway refuses, or to all if it serves anyone without a key.

        Otherwise strangers with invented keys could use the memory for bodies, which are read before the gateway is
        called.
        """
        try:
            await self._context.client.check_keys()
            if scope["method"] == "POST":
                await self._context.client.check_key()
        except GatewayOpen:
            return refusal(
                503, "the gateway asks its callers for no API key, so this port is closed", code="open_gateway"
            )
        except BottegaError as error:
            return error_response(error)
        return None

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if scope["method"] in ("GET", "HEAD", "POST", "DELETE", "OPTIONS") else "other"
        self._metrics.in_flight.dec()
        self._metrics.requests.labels(route, method, str(status)).inc()
        self._metrics.seconds.labels(route).observe(seconds)
        if route not in _OPEN_PATHS:
            facts = {"method": method, "route": route, "status": status, "seconds": round(seconds, 6)}
            _log.info("request", extra={**facts, "peer": scope["client"][0] if scope["client"] else ""})


def _is_open(path: str) -> bool:
    """Return whether a path is served without an API key."""
    return path in _OPEN_PATHS or is_page(path)


def _is_embedded_elsewhere(headers: Headers, path: str, origins: Sequence[str]) -> bool:
    """Return whether a page of an origin that may not makes a request without the header `origin`, as for <img>.

    Such a page could use pictures, on loopback also without a key. It may link here, and show pictures whose URL it was
    given.
    """
    if headers.get("sec-fetch-site") not in ("cross-site", "same-site") or path.startswith(f"{IMAGE_PATH}/"):
        return False
    page = headers.get("referer", "") + "/"
    return headers.get("sec-fetch-mode") != "navigate" and not page.startswith(
        tuple(f"{origin}/" for origin in origins)
    )


def _is_host(header: str, names: Sequence[str]) -> bool:
    """Return whether a header `host` names this service: an IP address, localhost or a configured name."""
    name = header.lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    else:
        name = name.rpartition(":")[0] if name.count(":") == 1 else name
    if name == "localhost" or name in (known.lower() for known in names):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _clipped(text: str) -> str:
    return repr(text[:100])
