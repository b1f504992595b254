"""Checks whether a model folder can be opened: its parts, and the headers of their weights."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bottega.client.types.checks import CheckResult, fail, ok
from bottega.miniature import WEIGHTS

# Safetensors' own bound on its JSON header.
_LONGEST_HEADER = 100 * 1000 * 1000
_NEEDED = ("scheduler", "text_encoder", "tokenizer", "unet", "vae")


class BrokenWeights(Exception):
    """A file of weights whose header cannot be trusted; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What a file of weights says about itself."""

    parameters: int
    size_bytes: int


def check_model(model: str) -> Iterator[CheckResult]:
    """The folder `model`, or the embedded "miniature"."""
    folder = WEIGHTS if model == "miniature" else Path(model)
    todo = "Give a folder in Diffusers' layout: bottega doctor --model FOLDER"
    try:
        index = json.loads((folder / "model_index.json").read_bytes())
        parts = [name for name, kind in index.items() if isinstance(kind, list) and kind[0]]
    except (OSError, ValueError, AttributeError, IndexError):
        yield fail(f"{folder} has no model_index.json that can be read", todo)
        return
    missing = [name for name in {*_NEEDED, *parts} if not (folder / name).is_dir()]
    if missing:
        yield fail(f"model {model} lacks {', '.join(sorted(missing))}", todo)
        return
    yield from _check_weights(model, [folder / name for name in parts])


def read_header(path: Path) -> Weights:
    """Reads a safetensors header and checks that the file is as long as it says. Raises BrokenWeights, OSError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
            raise BrokenWeights("it is no safetensors file, or cut off")
        header = file.read(length)
    try:
        tensors = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        end = max((entry["data_offsets"][1] for entry in tensors), default=0)
        parameters = sum(math.prod(entry["shape"]) for entry in tensors)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise BrokenWeights("its header cannot be read") from None
    if 8 + length + end != size:
        raise BrokenWeights(f"it has {size} bytes where its header says {8 + length + end}")
    return Weights(parameters=parameters, size_bytes=size)


def _check_weights(model: str, parts: list[Path]) -> Iterator[CheckResult]:
    found: list[Weights] = []
    broken = False
    for part in parts:
        files = sorted(part.glob("*.safetensors"))
        if not files and any(part.glob("*.bin")):
            broken = True
            yield fail(f"{part.name} of {model} has only pickled weights", "Convert them; only safetensors are opened.")
        for path in files:
            try:
                found.append(read_header(path))
            except (BrokenWeights, OSError) as error:
                broken = True
                yield fail(f"{part.name}/{path.name} of {model} cannot be used: {error}", "Copy the file again.")
    if not broken:
        size_mib = sum(weights.size_bytes for weights in found) / 2**20
        millions = sum(weights.parameters for weights in found) / 1e6
        yield ok(f"model {model}: {len(found)} files of weights, {millions:.1f} million parameters, {size_mib:.1f} MiB")
