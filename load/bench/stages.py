"""What do text encoders and VAE decoders as workers of their own gain or cost, at equal cores?

On one side two whole workers draw, each with a thread on a core of its own. On the other side two workers only denoise,
on the same cores, and ask a third one to encode, on the first core, and a fourth one to decode, on the second core.
Clients each start a request when their last one is done. The sides take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bottega.client import AsyncClient
from load.bench.framework import GUIDANCE_SCALE, PROMPT, Bench, Option, Sheet, by_turns, closed_loop, percentile
from load.bench.suites import CALL_S, Suite, suite

BENCH = Bench(
    __file__,
    __doc__,
    Option("--rounds", 5, "of both sides", smallest=1),
    Option("--requests", 48, "of each side in a round", smallest=4),
    Option("--clients", 6, "that draw at the same time", smallest=2),
    Option("--steps", 12, "of a picture", smallest=2),
)
_SIDES: Mapping[str, Mapping[str, tuple[list[str], int]]] = {
    "whole": {
        "worker-0": (["encode", "denoise", "decode"], 0),
        "worker-1": (["encode", "denoise", "decode"], 1),
    },
    "roles": {
        "worker-encode": (["encode"], 0),
        "worker-decode": (["decode"], 1),
        "worker-0": (["denoise"], 0),
        "worker-1": (["denoise"], 1),
    },
}
"""For each side, roles and core of each worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """The figures of one side in one round."""

    per_s: float
    p95_s: float


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Measure both sides by turns, and their memory at the end."""
    with _running(folder, "whole") as whole, _running(folder, "roles") as roles:
        found = by_turns(
            {
                "whole": lambda number: _drawn(whole, options, number),
                "roles": lambda number: _drawn(roles, options, number),
            },
            options.rounds,
        )
        memory = {"whole": _memory_mib(whole), "roles": _memory_mib(roles)}
    for side, rounds in found.items():
        per_s, p95_s = (median(values) for values in zip(*((each.per_s, each.p95_s) for each in rounds), strict=True))
        sheet.figure(f"{side}: pictures a second", per_s, key=f"{side}_per_s")
        sheet.figure("    p95", p95_s, "{:.2f} s", key=f"{side}_p95_s")
        for name, mib in memory[side].items():
            sheet.figure(f"    memory of {name}", mib, "{:.0f} MiB", key=f"{side}_{name.replace('-', '_')}_mib")
    ratios = [ours.per_s / theirs.per_s for ours, theirs in zip(found["roles"], found["whole"], strict=True)]
    sheet.figure("pictures a second, roles over whole", median(ratios), key="ratio")
    p95_ratios = [ours.p95_s / theirs.p95_s for ours, theirs in zip(found["roles"], found["whole"], strict=True)]
    sheet.figure("p95, roles over whole", median(p95_ratios), key="p95_ratio")


def _running(folder: Path, side: str) -> AbstractContextManager[Suite]:
    """Run the workers of one side."""
    workers = _SIDES[side]
    (folder / side).mkdir()
    return suite(
        folder / side,
        {
            name: {"engine": {"model": "miniature", "threads": 1, "roles": roles}}
            for name, (roles, _) in workers.items()
        },
        cores={name: core for name, (_, core) in workers.items()},
    )


def _drawn(running: Suite, options: argparse.Namespace, number: int) -> _Round:
    took_s: list[float] = []

    async def draw(client: AsyncClient, seed: int) -> None:
        began_s = time.monotonic()
        await client.generate(
            PROMPT,
            seed=1000 * number + seed,
            num_inference_steps=options.steps,
            guidance_scale=GUIDANCE_SCALE,
            timeout_s=CALL_S,
        )
        took_s.append(time.monotonic() - began_s)

    async def measured() -> float:
        async with AsyncClient(running.address, timeout_s=CALL_S) as client:
            return await closed_loop(
                lambda seed: draw(client, seed), requests=options.requests, clients=options.clients
            )

    per_s = asyncio.run(measured())
    return _Round(per_s=per_s, p95_s=percentile(took_s, 0.95))


def _memory_mib(running: Suite) -> dict[str, float]:
    """Return the resident memory of each worker, with its processes."""
    members = running.client.fleet().members
    return {member.name: member.load.memory_bytes / 2**20 for member in members if member.name in running.members}


if __name__ == "__main__":
    sys.exit(BENCH.command())
