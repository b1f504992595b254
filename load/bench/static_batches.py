"""The baseline of batching: a plain static server. All that wait, at most eight, run together to the end.

A static batch cannot let a member go early: it runs to the longest of its members' step counts, and all of
them are answered then. The pipeline is stock Diffusers; it knows nothing of the suite.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from load.bench.reference import Batch, Reference

MAX_BATCH = 8
REQUEST_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    steps: int
    seed: int
    done: asyncio.Future[None]


class StaticServer:
    """Draws what is asked of it, batch by batch. `stop` it."""

    def __init__(self, reference: Reference, prompt: str, guidance_scale: float) -> None:
        self._reference = reference
        self._prompt = prompt
        self._guidance_scale = guidance_scale
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()
        self._task = asyncio.create_task(self._serve())

    async def draw(self, steps: int, seed: int) -> None:
        """Draws one picture. Raises TimeoutError when none comes."""
        done = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Waiting(steps=steps, seed=seed, done=done))
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            await done

    async def stop(self) -> None:
        """Stops serving; what waits is dropped."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _serve(self) -> None:
        while True:
            members = [await self._queue.get()]
            while len(members) < MAX_BATCH and not self._queue.empty():
                members.append(self._queue.get_nowait())
            batch = Batch(
                prompts=(self._prompt,) * len(members),
                seeds=tuple(member.seed for member in members),
                steps=max(member.steps for member in members),
                guidance_scale=self._guidance_scale,
            )
            await asyncio.to_thread(self._reference.draw, batch)
            for member in members:
                member.done.set_result(None)
