"""Shows an API key with every call over a channel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from bottega.rpc.security.api_keys import bearer


def key_interceptors(key: str) -> Sequence[grpc.aio.ClientInterceptor]:
    """For calls of one request. Not for those who stream requests: the gateway's API has none."""
    return [_ShowsToUnary(key), _ShowsToStreams(key)]


class _ShowsToUnary(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, key: str) -> None:
        self._shown = bearer(key)

    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(_with(self._shown, client_call_details), request)


class _ShowsToStreams(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, key: str) -> None:
        self._shown = bearer(key)

    async def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(_with(self._shown, client_call_details), request)


def _with(shown: tuple[str, str], details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
    return grpc.aio.ClientCallDetails(
        method=details.method,
        timeout=details.timeout,
        metadata=grpc.aio.Metadata(*(details.metadata or ()), shown),
        credentials=details.credentials,
        wait_for_ready=details.wait_for_ready,
    )
