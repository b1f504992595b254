"""Checks whether a model folder can be opened: its parts, and the headers of their weights."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

from bottega.client.types.checks import CheckResult, fail, ok
from bottega.errors import BadLora
from bottega.lora.safetensors_header import Header, read_header
from bottega.miniature import WEIGHTS

_NEEDED = ("scheduler", "text_encoder", "tokenizer", "unet", "vae")


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


def _check_weights(model: str, parts: list[Path]) -> Iterator[CheckResult]:
    found: list[Header] = []
    broken = False
    for part in parts:
        files = sorted(part.glob("*.safetensors"))
        if not files and any(part.glob("*.bin")):
            broken = True
            yield fail(f"{part.name} of {model} has only pickled weights", "Convert them; only safetensors are opened.")
        for path in files:
            try:
                with path.open("rb") as file:
                    found.append(read_header(file))
            except (BadLora, OSError) as error:
                broken = True
                yield fail(f"{part.name}/{path.name} of {model} cannot be used: {error}", "Copy the file again.")
    if not broken:
        size_mib = sum(header.size_bytes + header.data_bytes for header in found) / 2**20
        millions = sum(math.prod(tensor.shape) for header in found for tensor in header.tensors) / 1e6
        yield ok(f"model {model}: {len(found)} files of weights, {millions:.1f} million parameters, {size_mib:.1f} MiB")
