"""A client that nobody here wrote: grpc-js of npm, which learns the contract by reflection (tests/second_client)."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from load.clients.build import installed_modules

_SOURCE = Path(__file__).parents[1] / "second_client"
_CALLS_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """How a call ended. code: the name of its status. answers: every message, as JSON; bytes as base64."""

    call: str
    code: str
    details: str
    answers: Sequence[Mapping[str, Any]]


def installed() -> Path:
    """Where its packages are."""
    return installed_modules(_SOURCE, "second_client")


async def make_calls(
    packages: Path, address: str, calls: Sequence[tuple[str, Mapping[str, Any], float]]
) -> tuple[list[Called], list[str]]:
    """Makes calls (method, request, seconds) one after the other; how each ended, and the services that it found."""
    lines = [json.dumps({"call": call, "data": data, "timeout_s": timeout_s}) for call, data, timeout_s in calls]
    told = await _run(packages, address, lines)
    *ended, last = (json.loads(line) for line in told.splitlines())
    return [Called(**call) for call in ended], last["services"]


async def _run(packages: Path, address: str, lines: Sequence[str]) -> bytes:
    """Run the client; what it wrote."""
    process = await asyncio.create_subprocess_exec(
        "node",
        str(_SOURCE / "calls.js"),
        address,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "NODE_PATH": str(packages)},
    )
    try:
        async with asyncio.timeout(_CALLS_TIMEOUT_S):
            told, failed = await process.communicate("\n".join(lines).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, failed.decode()
    return told
