"""What the SDK says while no gateway answers, and that it goes on trying."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

import pytest

from bottega.client import AsyncClient, Client, RetryPolicy
from bottega.client.cli import _Notes
from bottega.client.cli.progress_bar import show_progress
from bottega.client.transport import calls
from bottega.errors import Unavailable
from tests.support.waiting import eventually

Call = Callable[[AsyncClient], Awaitable[object]]


async def _models(client: AsyncClient) -> None:
    await client.models()


async def _generate(client: AsyncClient) -> None:
    await client.generate("a big red star")


async def _image(client: AsyncClient) -> None:
    await client.job("f" * 32).image()


@pytest.mark.parametrize(("call", "silent"), [(_models, True), (_generate, False), (_image, False)])
def test_a_warning_says_that_nothing_answers_before_patience_is_over(
    call: Call, silent: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """silent: something accepts the connection and says nothing, as behind many a firewall."""
    monkeypatch.setattr(calls, "UNREACHED_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        if not silent:
            listener.close()
        asyncio.run(_call_until_warned(address, call, caplog))
    (warning,) = _warnings(caplog)
    assert warning.message.startswith(f"no gateway answers at {address} yet; still trying.")


def _warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [item for item in caplog.records if item.levelno == logging.WARNING and "answers" in item.message]


async def _call_until_warned(address: str, call: Call, caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncClient(address) as client:
        calling = asyncio.ensure_future(call(client))
        await eventually(lambda: bool(_warnings(caplog)))
        assert not calling.done(), "it goes on trying"
        calling.cancel()
        await asyncio.wait([calling])


def test_a_command_that_draws_says_it_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(calls, "UNREACHED_S", 0.1)
    logger = logging.getLogger("bottega.client")
    handler = _Notes()
    logger.addHandler(handler)
    try:
        client = Client("127.0.0.1:1", retry=RetryPolicy(patience_s=0.5))
        with client, pytest.raises(Unavailable):
            show_progress(client.stream("a big red star"))
    finally:
        logger.removeHandler(handler)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("no gateway answers at 127.0.0.1:1 yet; still trying.")
