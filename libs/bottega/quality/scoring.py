"""Scores pictures in a child process, so that the caller needs neither numpy nor torch."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bottega.errors import InvalidRequest, Unavailable
from bottega.process.child import ChildProcess

_MODULE = "bottega.quality"
# For torch and a large CLIP from a slow disk.
_START_S = 300.0
# A large vision tower on a CPU takes seconds.
_SCORE_S = 120.0
_STOP_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreQuestion:
    """A request to score how well a picture, in any common format, shows a prompt."""

    prompt: str
    picture: bytes

    def packed(self) -> bytes:
        """Serialize the request as a frame."""
        return json.dumps({"prompt": self.prompt, "picture": base64.b64encode(self.picture).decode()}).encode()

    @classmethod
    def unpacked(cls, frame: bytes) -> ScoreQuestion:
        """Parse the request in a frame."""
        fields = json.loads(frame)
        return cls(prompt=fields["prompt"], picture=base64.b64decode(fields["picture"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreAnswer:
    """The response: a score, of which more is better."""

    score: float = 0.0
    error: str = ""
    """Why there is no score; "" if there is one."""

    def packed(self) -> bytes:
        """Serialize the response as a frame."""
        return json.dumps({"score": self.score, "error": self.error}).encode()

    @classmethod
    def unpacked(cls, frame: bytes) -> ScoreAnswer:
        """Parse the response in a frame."""
        fields = json.loads(frame)
        return cls(score=fields["score"], error=fields["error"])


class Scorer:
    """A running scoring process, which answers one call at a time.

    If an answer does not arrive, or its caller stops waiting, the scorer becomes unusable, because a late answer could
    be taken for that of the next call.
    """

    def __init__(self, child: ChildProcess) -> None:
        self._child = child
        self._turn = asyncio.Lock()
        self._in_step = True

    async def begin(self) -> None:
        """Wait until the process is ready. Raise InvalidRequest if it cannot score, or Unavailable."""
        if error := (await self._receive(_START_S)).error:
            raise InvalidRequest(f"pictures cannot be scored: {error}")

    async def score(self, prompt: str, picture: bytes) -> float:
        """Return a score. Raise InvalidRequest if the prompt has none, or Unavailable if the process is lost."""
        async with self._turn:
            if not self._in_step:
                raise Unavailable("the scoring process did not answer an earlier request")
            self._in_step = False
            await self._child.channel.send(ScoreQuestion(prompt=prompt, picture=picture).packed())
            answer = await self._receive(_SCORE_S)
            self._in_step = True
        if answer.error:
            raise InvalidRequest(answer.error)
        return answer.score

    async def _receive(self, timeout_s: float) -> ScoreAnswer:
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
    """Yield a scorer with the CLIP model in a folder, or the embedded model's own scorer. It is stopped at the end.

    Raises InvalidRequest if the CLIP model, or the software that it needs, is missing.
    """
    arguments = ["--clip", str(clip)] if clip else []
    child = await ChildProcess.start(_MODULE, *arguments, env={"OMP_WAIT_POLICY": "PASSIVE"})
    try:
        running = Scorer(child)
        await running.begin()
        yield running
    finally:
        await child.stop(_STOP_S)
