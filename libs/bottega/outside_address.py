"""An HTTP transport for URLs that callers name, which connects only to addresses that the rules allow.

It resolves the name of each request once, checks every address, and connects to an address that it checked, so that a
name that changes its address (DNS rebinding) gains nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx

from bottega.outside_rules import OutsideRules, address_of, host_in

__all__ = ["SHARE", "OutsideRules", "PinnedTransport", "Resolve", "outside_client", "resolve_name"]

Resolve = Callable[[str], Sequence[str]]
"""Returns the addresses of a host name; it may block. Raises OSError if there are none."""

# Addresses of a name that are tried: two of each family.
_MAX_ADDRESSES = 4


SHARE = "share"
"""Extension of a request: on whose behalf it is sent, a text. Its look-ups of names do not delay those of others."""


class PinnedTransport(httpx.AsyncBaseTransport):
    """An HTTP transport that connects only to addresses that the rules allow, whatever the name's server answers.

    TLS verifies the certificate for the name, not for the address. Each request has a connection of its own, because a
    connection to an address that two names share is verified for one of them only.

    Args:
        rules: The rules for URLs and addresses.
        resolve: Resolves names, in threads of the transport.
        max_resolving: Upper bound on the names of one share that are resolved at once; all shares together resolve
            eight times as many. Others wait, within the request's connect timeout.
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
        self._names = _NameLookups(resolve or resolve_name, total=8 * max_resolving, per_share=max_resolving)
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
        await self._inner.aclose()

    async def _addresses(self, host: str, request: httpx.Request) -> list[str]:
        if address_of(host) is not None:
            return [host]
        try:
            async with asyncio.timeout(request.extensions.get("timeout", {}).get("connect")):
                found = await self._names.addresses(host, share=request.extensions.get(SHARE, ""))
        except TimeoutError:
            raise httpx.ConnectTimeout(f"the name {host} was not resolved in time", request=request) from None
        except OSError as error:
            raise httpx.ConnectError(f"the name {host} cannot be resolved: {error.strerror}", request=request) from None
        for address in found:
            self._rules.check_address(address)
        return list(_of_both_families(found))


class _NameLookups:
    """Look-ups of names, each in a daemon thread of its own.

    The system's resolver cannot be interrupted: a thread may outlive the wait for it by half a minute. So look-ups are
    counted until their threads end, by share, and the process does not wait for them when it exits.
    """

    def __init__(self, resolve: Resolve, *, total: int, per_share: int) -> None:
        self._resolve = resolve
        self._total = total
        self._per_share = per_share
        self._running = Counter[str]()
        self._ended = asyncio.Event()

    async def addresses(self, host: str, *, share: str) -> Sequence[str]:
        """Return the addresses of a name, when there is a thread for it. Raises what `resolve` raises."""
        while self._running[share] >= self._per_share or self._running.total() >= self._total:
            self._ended.clear()
            await self._ended.wait()
        found: asyncio.Future[Sequence[str]] = asyncio.get_running_loop().create_future()
        threading.Thread(target=self._look_up, args=(host, share, found), name="name look-up", daemon=True).start()
        self._running[share] += 1  # before `_end`, which runs in this loop
        return await found

    def _look_up(self, host: str, share: str, found: asyncio.Future[Sequence[str]]) -> None:
        addresses: Sequence[str] = ()
        failure = None
        try:
            addresses = self._resolve(host)
        except Exception as error:  # noqa: BLE001 - raised where the look-up is awaited
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            found.get_loop().call_soon_threadsafe(self._end, share, found, addresses, failure)

    def _end(
        self, share: str, found: asyncio.Future[Sequence[str]], addresses: Sequence[str], failure: Exception | None
    ) -> None:
        self._running[share] -= 1
        if not self._running[share]:
            del self._running[share]
        self._ended.set()
        if found.done():
            return
        if failure is None:
            found.set_result(addresses)
        else:
            found.set_exception(failure)


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
