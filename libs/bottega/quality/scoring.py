"""Asks a process of its own for scores of pictures, so that the asking one needs neither numpy nor torch."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bottega.errors import InvalidRequest, Unavailable
from bottega.process import ChildProcess

_MODULE = "bottega.quality"
# torch and a large CLIP from a slow disk.
_START_S = 300.0
# A large vision tower on a processor takes seconds.
_SCORE_S = 120.0
_STOP_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreQuestion:
    """How well does the picture, encoded in any common format, show what the prompt says?"""

    prompt: str
    picture: bytes

    def packed(self) -> bytes:
        """A frame."""
        return json.dumps({"prompt": self.prompt, "picture": base64.b64encode(self.picture).decode()}).encode()

    @classmethod
    def unpacked(cls, frame: bytes) -> ScoreQuestion:
        """From a frame."""
        said = json.loads(frame)
        return cls(prompt=said["prompt"], picture=base64.b64decode(said["picture"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreAnswer:
    """More is better. error: why there is no score; empty where there is one."""

    score: float = 0.0
    error: str = ""

    def packed(self) -> bytes:
        """A frame."""
        return json.dumps({"score": self.score, "error": self.error}).encode()

    @classmethod
    def unpacked(cls, frame: bytes) -> ScoreAnswer:
        """From a frame."""
        said = json.loads(frame)
        return cls(score=said["score"], error=said["error"])


class Scorer:
    """A running scoring process; of several calls, one at a time is answered.

    Once an answer has not come, or was not waited for, there is no other one: it would be taken for the next one's.
    """

    def __init__(self, child: ChildProcess) -> None:
        self._child = child
        self._turn = asyncio.Lock()
        self._in_step = True

    async def begin(self) -> None:
        """Waits for the process. Raises InvalidRequest where it cannot score, Unavailable."""
        if error := (await self._receive(_START_S)).error:
            raise InvalidRequest(f"pictures cannot be scored: {error}")

    async def score(self, prompt: str, picture: bytes) -> float:
        """Raises InvalidRequest where there is no score for such a prompt, Unavailable where the process is lost."""
        async with self._turn:
            if not self._in_step:
                raise Unavailable("the scoring process still owes an answer to somebody else")
            self._in_step = False
            await self._child.channel.send(ScoreQuestion(prompt=prompt, picture=picture).packed())
            answer = await self._receive(_SCORE_S)
            self._in_step = True
        if answer.error:
            raise InvalidRequest(answer.error)
        return answer.score

    async def _receive(self, timeout_s: float) -> ScoreAnswer:
        """The next answer. Raises Unavailable."""
        try:
            async with asyncio.timeout(timeout_s):
                frame = await self._child.channel.recv()
        except TimeoutError:
            raise Unavailable(f"the scoring process did not answer within {timeout_s:.0f} s") from None
        if frame is None:
            raise Unavailable("the scoring process has ended")
        return ScoreAnswer.unpacked(frame)


@asynccontextmanager
async def scorer(clip: Path | None) -> AsyncIterator[Scorer]:
    """Scores by the CLIP in that folder; without one, by the miniature's oracle. Stopped in the end.

    Raises InvalidRequest where the CLIP, or what it takes to run it, is not there.
    """
    arguments = ["--clip", str(clip)] if clip else []
    child = await ChildProcess.start(_MODULE, *arguments, env={"OMP_WAIT_POLICY": "PASSIVE"})
    try:
        running = Scorer(child)
        await running.begin()
        yield running
    finally:
        await child.stop(_STOP_S)
