"""What was measured with pairs of prompts: a line of a file for each pair, so that an interrupted measurement goes on.

The first line says how it was measured; a file of another way is refused.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from bottega.client.addons.cache.prompt_pairs import PromptPair
from bottega.errors import InvalidRequest
from bottega.latents.names import FRACTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How pairs are measured. judge: who scores pictures, for people. draws: of each pair, with seeds of their own."""

    model_hash: str
    num_inference_steps: int
    draws: int
    judge: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSample:
    """One pair. similarity: cosine of its prompts' embeddings. words: of the second prompt.

    uncached: mean quality of the second prompt's pictures drawn from noise. cached: of those with the same seeds that
    start from latents of the first prompt's pictures, by the fraction of the steps that is skipped.
    """

    first: str
    second: str
    words: int
    similarity: float
    uncached: float
    cached: Mapping[float, float]

    @property
    def pair(self) -> PromptPair:
        """Its prompts."""
        return PromptPair(first=self.first, second=self.second)


class SampleFile:
    """Where samples are kept as they come; without a path, in memory alone. Any thread may add to it.

    Raises InvalidRequest where the file is of another measurement, or none, or cannot be written.
    """

    def __init__(self, path: Path | None, method: Method) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.samples: list[PairSample] = []
        if path is None:
            return
        try:
            if path.exists() and path.stat().st_size:
                self.samples = _read(path, method)
            else:
                path.write_text(json.dumps(asdict(method)) + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidRequest(f"{path} can keep no samples: {error.strerror}; name another file") from None

    def add(self, sample: PairSample) -> None:
        """Keeps it."""
        with self._lock:
            self.samples.append(sample)
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(sample)) + "\n")

    def missing(self, pairs: Iterable[PromptPair]) -> list[PromptPair]:
        """Those of the pairs that there is no sample of."""
        known = {sample.pair for sample in self.samples}
        return [pair for pair in pairs if pair not in known]


def _read(path: Path, method: Method) -> list[PairSample]:
    """Raises InvalidRequest, OSError."""
    try:
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        lines = whole.splitlines()
        if json.loads(lines[0]) != asdict(method):
            raise InvalidRequest(f"{path} was measured in another way: {lines[0]}; name another file")
        samples = [_sample(line) for line in lines[1:]]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidRequest(f"{path} is no file of samples ({type(error).__name__}); name another one") from None
    if whole != text:  # its writer was killed in the middle of a line: that pair is drawn again
        path.write_text(whole, encoding="utf-8")
    return samples


def _sample(line: str) -> PairSample:
    said = json.loads(line)
    cached = {float(fraction): float(quality) for fraction, quality in said.pop("cached").items()}
    if strange := cached.keys() - set(FRACTIONS):
        raise ValueError(f"{strange} is no fraction")
    return PairSample(**said, cached=cached)
