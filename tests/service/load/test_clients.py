"""The example clients in Go, TypeScript and curl are built from the contract, and draw."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from load.clients import build
from load.clients.build import Language
from tests.support.running_gateway import running_gateway
from tests.support.running_http import running_http

_SCRIPT = Path(build.__file__).with_name("draw.sh")


async def _draw(command: Sequence[str], address: str, file: Path) -> str:
    """Runs a client; what it printed."""
    process = await asyncio.create_subprocess_exec(
        *command, address, 'a "red" star', str(file), stdout=asyncio.subprocess.PIPE, env={**os.environ}
    )
    printed, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    return printed.decode()


async def test_stubs_for_typescript_compile_and_draw(tmp_path: Path) -> None:
    command = await _built("typescript", tmp_path)
    async with running_gateway() as house:
        worker = await house.worker()
        printed = await _draw(command, house.address, tmp_path / "star.png")
    assert (tmp_path / "star.png").read_bytes() == b"picture 0"
    assert (worker.requests[0].spec.prompt, worker.requests[0].spec.seed) == ('a "red" star', 7)
    assert "star.png, seed 7" in printed


async def test_stubs_for_go_compile(tmp_path: Path) -> None:
    assert await _built("go", tmp_path)


async def _built(language: Language, folder: Path) -> Sequence[str]:
    if why := build.missing(language):
        pytest.skip(why)
    return await asyncio.to_thread(build.build, language, folder)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
async def test_the_example_for_curl_draws(tmp_path: Path) -> None:
    async with running_gateway() as house, running_http(house.address) as door:
        await house.worker()
        printed = await _draw([str(_SCRIPT)], door.server.address, tmp_path / "star.png")
    assert (tmp_path / "star.png").read_bytes() == b"picture 0"
    assert "job.completed" in printed
