"""Addresses outside the suite: which URLs are refused, and that a connection goes only where the rules allow."""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from bottega.config import parse
from bottega.errors import AddressRefused, ConfigError
from bottega.outside_address import SHARE, OutsideRules, PinnedTransport, outside_client
from tests.support.certificates import self_signed

PUBLIC = OutsideRules(hosts=("*",))
HOSTILE = [
    # Addresses inside.
    "https://127.0.0.1/",
    "https://10.0.0.1/",
    "https://100.64.0.1/",
    "https://0.0.0.0/",
    "https://224.0.0.1/",
    "https://198.18.0.1/",
    # Metadata of clouds: AWS and others, ECS, Azure, Alibaba, Oracle, AWS over IPv6.
    "https://169.254.169.254/latest/meta-data/",
    "https://169.254.170.2/v2/credentials",
    "https://168.63.129.16/metadata",
    "https://100.100.100.200/latest/meta-data/",
    "https://192.0.0.192/opc/v2/",
    "https://[fd00:ec2::254]/",
    # IPv6: loopback, unspecified, unique local, link-local with and without a zone, site-local, multicast.
    "https://[::1]/",
    "https://[::]/",
    "https://[fc00::1]/",
    "https://[fe80::1%25eth0]/",
    "https://[fec0::1]/",
    "https://[ff02::1]/",
    # IPv6 that stands for IPv4: mapped in two notations, compatible, translated, NAT64, local NAT64, 6to4, Teredo.
    "https://[::ffff:127.0.0.1]/",
    "https://[::ffff:a9fe:a9fe]/",
    "https://[::127.0.0.1]/",
    "https://[::ffff:0:127.0.0.1]/",
    "https://[64:ff9b::127.0.0.1]/",
    "https://[64:ff9b:1::7f00:1]/",
    "https://[2002:7f00:1::]/",
    "https://[2001:0:7f00:1::]/",
    # Decimal, octal, hexadecimal, short, escaped and full-width forms of 127.0.0.1.
    "https://2130706433/",
    "https://0177.0.0.1/",
    "https://0x7f000001/",
    "https://127.1/",
    "https://127.0.0.1./",
    "https://127%2e0.0.1/",
    "https://\uff11\uff12\uff17.0.0.1/",
    "https://127\u30020.0.1/",
    # Credentials, other schemes, other ports, and what parsers read in two ways.
    "https://example.com@127.0.0.1/",
    "https://user:secret@example.com/",
    "http://example.com/",
    "file:///etc/passwd",
    "//example.com/",
    "https:example.com",
    "https://example.com:22/",
    "https://example.com:99999/",
    "https://example.com\\@127.0.0.1/",
    "https://example.com/ HTTP/1.1\r\nHost: inside",
    "https://example.com/#@127.0.0.1",
    "https:///path",
    "https://" + "a" * 64 + ".example/",
    "https://example.com/" + "a" * 2048,
    "",
]


@pytest.mark.parametrize("url", HOSTILE, ids=lambda url: ascii(url)[:60])
def test_hostile_urls_are_refused_although_every_public_host_is_allowed(url: str) -> None:
    with pytest.raises(AddressRefused):
        PUBLIC.check(url)


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com",
        "https://Example.COM:443/a?b=@c",
        "https://example.com./",
        "https://xn--bcher-kva.example/",
        "https://8.8.8.8/",
        "https://[2606:4700::1111]/",
        "https://[64:ff9b::8.8.8.8]/",
    ],
)
def test_public_urls_are_accepted_where_every_public_host_is_allowed(url: str) -> None:
    PUBLIC.check(url)


def test_only_listed_hosts_networks_and_ports_are_allowed() -> None:
    rules = OutsideRules(
        hosts=("hooks.example", "*.partner.example", "10.1.2.3"),
        networks=("10.1.0.0/16",),
        ports=(443, 8443),
        plain_http=True,
    )
    for url in ("https://hooks.example:8443/x", "http://a.b.partner.example:443/", "https://10.1.2.3/"):
        rules.check(url)
    for url in (
        "https://example/",
        "https://a.hooks.example/",
        "https://partner.example/",
        "https://evilpartner.example/",
        "https://10.1.2.4/",
        "https://10.2.0.1/",
        "https://8.8.8.8/",
        "http://hooks.example/",
    ):
        with pytest.raises(AddressRefused):
            rules.check(url)
    with pytest.raises(AddressRefused, match="not allowed here"):
        OutsideRules(hosts=("*",), networks=("10.1.0.0/16",)).check("https://10.1.2.3/")
    assert not OutsideRules().allows_any
    with pytest.raises(AddressRefused, match="not allowed here"):
        OutsideRules().check("https://example.com/")


def test_metadata_addresses_are_refused_inside_an_allowed_network() -> None:
    rules = OutsideRules(hosts=("*",), networks=("0.0.0.0/0", "::/0"))
    rules.check_address("10.0.0.1")
    rules.check_address("::1")
    for address in ("169.254.169.254", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "fd00:ec2::254", "0.0.0.0"):
        with pytest.raises(AddressRefused):
            rules.check_address(address)


@pytest.mark.parametrize("values", [{"hosts": ["a b"]}, {"hosts": ["127.1"]}, {"networks": ["10.0.0.1/8"]}])
def test_rules_that_mean_nothing_are_refused_in_a_configuration(values: dict[str, list[str]]) -> None:
    with pytest.raises(ConfigError):
        parse(OutsideRules, values, source="test.yaml")


@asynccontextmanager
async def _receiver(answer: bytes, context: ssl.SSLContext | None = None) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Serve one answer to every request on loopback. Yields the port and the requests' heads."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1], heads


_OK = b"HTTP/1.1 200 OK\r\nset-cookie: a=b\r\ncontent-length: 2\r\n\r\nok"
_LOOPBACK = OutsideRules(hosts=("*",), networks=("127.0.0.0/8",), ports=(), plain_http=True)


def _client(
    rules: OutsideRules, resolve: Callable[[str], list[str]], verify: ssl.SSLContext | None = None
) -> httpx.AsyncClient:
    return outside_client(PinnedTransport(rules, resolve=resolve, verify=verify), timeout_s=10.0)


async def test_a_name_is_resolved_once_and_the_connection_goes_to_that_address() -> None:
    answers = iter([["127.0.0.1"], ["127.0.0.1"]])
    async with _receiver(_OK) as (port, heads), _client(_LOOPBACK, lambda host: next(answers)) as client:
        for _ in range(2):
            assert (await client.get(f"http://rebinding.example:{port}/")).status_code == 200
        assert next(answers, None) is None
    assert all(f"Host: rebinding.example:{port}".encode() in head for head in heads)
    assert not any(b"cookie" in head.lower() for head in heads)


async def test_a_name_with_one_address_inside_is_not_called_at_all() -> None:
    rules = OutsideRules(hosts=("*",), ports=(), plain_http=True)
    async with _receiver(_OK) as (port, heads):
        for found in (["127.0.0.1"], ["8.8.8.8", "127.0.0.1"], ["::ffff:7f00:1"], ["fe80::1%lo"]):
            async with _client(rules, {"sneaky.example": found}.__getitem__) as client:
                with pytest.raises(AddressRefused):
                    await client.get(f"http://sneaky.example:{port}/")
    assert not heads


async def test_another_address_is_tried_if_the_first_cannot_be_reached() -> None:
    async with (
        _receiver(_OK) as (port, _),
        _client(_LOOPBACK, lambda host: ["127.77.0.1", "127.0.0.1"]) as client,
    ):
        assert (await client.get(f"http://two.example:{port}/")).status_code == 200


async def test_redirects_are_not_followed_and_are_checked_if_a_client_follows_them() -> None:
    redirect = b"HTTP/1.1 302 Found\r\nlocation: http://169.254.169.254/\r\ncontent-length: 0\r\n\r\n"
    async with _receiver(redirect) as (port, _), _client(_LOOPBACK, lambda host: ["127.0.0.1"]) as client:
        assert (await client.get(f"http://a.example:{port}/")).status_code == 302
        with pytest.raises(AddressRefused):
            await client.get(f"http://a.example:{port}/", follow_redirects=True)


async def test_names_without_an_answer_end_with_the_time_for_connecting() -> None:
    async with asyncio.timeout(60.0):
        waiting = asyncio.Event()
        loop = asyncio.get_running_loop()

        def never(host: str) -> list[str]:
            asyncio.run_coroutine_threadsafe(waiting.wait(), loop).result()
            return []

        async with _client(_LOOPBACK, never) as client:
            with pytest.raises(httpx.ConnectTimeout):
                await client.get("http://slow.example/", timeout=0.05)
            waiting.set()
        async with _client(_LOOPBACK, lambda host: (_ for _ in ()).throw(OSError(2, "unknown name"))) as client:
            with pytest.raises(httpx.ConnectError, match="unknown name"):
                await client.get("http://missing.example/")


async def test_names_that_hang_hold_the_threads_of_their_share_alone_and_not_the_exit() -> None:
    hang = threading.Event()

    def resolve(host: str) -> list[str]:
        if host.startswith("slow"):
            hang.wait()
        return ["127.0.0.1"]

    async with _receiver(_OK) as (port, _), _client(_LOOPBACK, resolve) as client:

        async def get(host: str, share: str, timeout_s: float = 30.0) -> None:
            await client.get(f"http://{host}.example:{port}/", timeout=timeout_s, extensions={SHARE: share})

        slow = [get(f"slow{number}", "a", 0.01) for number in range(20)]
        assert all(isinstance(end, httpx.ConnectTimeout) for end in await asyncio.gather(*slow, return_exceptions=True))
        threads = [thread for thread in threading.enumerate() if thread.name == "name look-up"]
        assert len(threads) == 8
        assert all(thread.daemon for thread in threads), "the process does not wait for them when it exits"
        await get("quick", "b")
        with pytest.raises(httpx.ConnectTimeout):
            await get("quick", "a", 0.01)
        hang.set()
        await get("quick", "a")
        for thread in threads:
            await asyncio.to_thread(thread.join, 30.0)


async def test_tls_verifies_the_name_and_not_the_address(tmp_path: Path) -> None:
    path = self_signed(tmp_path, "right.example")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(path)
    trusted = ssl.create_default_context(cafile=str(path))
    async with (
        _receiver(_OK, context) as (port, _),
        _client(_LOOPBACK, lambda host: ["127.0.0.1"], trusted) as client,
    ):
        assert (await client.get(f"https://right.example:{port}/")).status_code == 200
        with pytest.raises(httpx.ConnectError, match=r"wrong\.example"):
            await client.get(f"https://wrong.example:{port}/")
    async with _receiver(_OK, context) as (port, _), _client(_LOOPBACK, lambda host: ["127.0.0.1"]) as client:
        with pytest.raises(httpx.ConnectError, match="self-signed"):
            await client.get(f"https://right.example:{port}/")


def test_addresses_are_judged_the_same_on_every_version_of_python() -> None:
    for network in ("192.88.99.0/24", "3fff::/20", "2001::/23", "100.64.0.0/10"):
        with pytest.raises(AddressRefused):
            PUBLIC.check_address(str(ipaddress.ip_network(network)[1]))
