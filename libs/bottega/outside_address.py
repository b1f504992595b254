"""An HTTP transport for URLs that callers name, which connects only to addresses that the rules allow.

It resolves the name of each request once, checks every address, and connects to an address that it checked, so that a
name that changes its address (DNS rebinding) gains nothing.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx

from bottega.outside_rules import OutsideRules, address_of, host_in

__all__ = ["OutsideRules", "PinnedTransport", "Resolve", "outside_client", "resolve_name"]

Resolve = Callable[[str], Sequence[str]]
"""Returns the addresses of a host name; it may block. Raises OSError if there are none."""

# Addresses of a name that are tried: two of each family.
_MAX_ADDRESSES = 4


class PinnedTransport(httpx.AsyncBaseTransport):
    """An HTTP transport that connects only to addresses that the rules allow, whatever the name's server answers.

    TLS verifies the certificate for the name, not for the address. Each request has a connection of its own, because a
    connection to an address that two names share is verified for one of them only.

    Args:
        rules: The rules for URLs and addresses.
        resolve: Resolves names, in threads of the transport.
        max_resolving: Number of names that are resolved at once. Others wait, within the request's connect timeout.
        verify: The certificates to trust; None for those of well-known authorities.
    """

    def __init__(
        self,
        rules: OutsideRules,
        *,
        resolve: Resolve | None = None,
        max_resolving: int = 8,
        verify: ssl.SSLContext | None = None,
    ) -> None:
        self._rules = rules
        self._resolve = resolve or resolve_name
        # Not the event loop's own threads: servers of names that never answer would take them from everyone.
        self._threads = ThreadPoolExecutor(max_resolving, thread_name_prefix="names")
        self._inner = httpx.AsyncHTTPTransport(
            verify=verify or True,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request to an allowed address of its host.

        Raises:
            AddressRefused: If the URL or one of the host's addresses breaks a rule. Nothing was sent then.
        """
        self._rules.check(str(request.url))
        host = host_in(request.url)
        failure: httpx.HTTPError = httpx.ConnectError(f"{host} has no address", request=request)
        for address in await self._addresses(host, request):
            try:
                return await self._inner.handle_async_request(_pinned(request, host, address))
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = error
        raise failure

    async def aclose(self) -> None:
        """Close all connections. Names that are still being resolved are forgotten."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._inner.aclose()

    async def _addresses(self, host: str, request: httpx.Request) -> list[str]:
        if address_of(host) is not None:
            return [host]
        resolving = asyncio.get_running_loop().run_in_executor(self._threads, self._resolve, host)
        try:
            async with asyncio.timeout(request.extensions.get("timeout", {}).get("connect")):
                found = await resolving
        except TimeoutError:
            raise httpx.ConnectTimeout(f"the name {host} was not resolved in time", request=request) from None
        except OSError as error:
            raise httpx.ConnectError(f"the name {host} cannot be resolved: {error.strerror}", request=request) from None
        for address in found:
            self._rules.check_address(address)
        return list(_of_both_families(found))


def outside_client(transport: httpx.AsyncBaseTransport, *, timeout_s: float) -> httpx.AsyncClient:
    """Return a client that follows no redirects, keeps no cookies, and uses no proxy of the environment.

    Args:
        transport: A PinnedTransport; closed with the client.
        timeout_s: Upper bound on each step of a request, such as one read. Bound the whole by asyncio.timeout.
    """
    no_cookies = CookieJar(policy=DefaultCookiePolicy(allowed_domains=[]))
    return httpx.AsyncClient(
        transport=transport, follow_redirects=False, trust_env=False, timeout=timeout_s, cookies=no_cookies
    )


def resolve_name(host: str) -> list[str]:
    """Return the addresses of a name as the system resolves it. Raise OSError if there are none."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


def _pinned(request: httpx.Request, host: str, address: str) -> httpx.Request:
    """Return the request with an address in place of the host; the header Host and TLS keep the name."""
    return httpx.Request(
        request.method,
        request.url.copy_with(host=address),
        headers=request.headers,
        stream=request.stream,
        extensions={**request.extensions, "sni_hostname": host},
    )


def _of_both_families(addresses: Sequence[str]) -> Iterator[str]:
    """Yield the first addresses of each family, in their order."""
    counts = {True: 0, False: 0}
    for address in addresses:
        is_v6 = ":" in address
        counts[is_v6] += 1
        if counts[is_v6] <= _MAX_ADDRESSES // 2:
            yield address
