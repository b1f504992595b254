"""The element type that a model computes in if the operator does not choose one.

A preset may name it, as that of the embedded model does, whose files are in half precision to be small. Otherwise files
in float32 are computed in float32 everywhere, so that pictures do not change. Files in half precision are computed as
they are on a GPU. On a CPU they are computed in bfloat16 or in float32, whichever was measured to be faster: processors
without bfloat16 instructions are many times slower in it, and in float16 nearly all are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from bottega.model_files import ModelReport
from bottega.model_files.presets import read_preset
from bottega.process.memory import available_bytes

_log = logging.getLogger(__name__)

AUTO = "auto"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Names in headers of safetensors files.
_FILE_DTYPES = {"F64": torch.float32, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# A linear layer and a convolution like those in SDXL's middle, which take milliseconds each.
_TOKENS, _WIDTH = 256, 1280
_CHANNELS, _SIDE = 320, 32
_ROUNDS = 3
# Rounds end after this time, because an element type that is so slow is not chosen anyway.
_PROBE_S = 0.5
# Float32 must be this many times as fast to be worth twice the memory, and to be chosen in every start alike.
_WORTH = 1.2
# Share of the available memory that the weights may take.
_MEMORY_SHARE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTimes:
    """Seconds of the same layers in both element types."""

    float32_s: float
    bfloat16_s: float


def pick_dtype(wanted: str, report: ModelReport, device: torch.device) -> torch.dtype:
    """Return the element type that a model computes in.

    Args:
        wanted: float32, float16, bfloat16, or auto.
        report: Report on the model's folder.
        device: Device that it computes on.

    Raises:
        ValueError: The model's preset is malformed.
    """
    preset = read_preset(report.folder)
    if wanted == AUTO and preset is not None and preset.dtype is not None:
        wanted = preset.dtype
    if wanted != AUTO:
        if wanted == "float16" and device.type == "cpu":
            _log.warning("float16 is many times slower than float32 or bfloat16 on a CPU; use dtype auto or bfloat16")
        return DTYPES[wanted]
    of_files = files_dtype(report)
    if of_files == torch.float32 or device.type != "cpu":
        return of_files
    dtype, why = _pick_for_cpu(4 * sum(part.parameters for part in report.parts.values()))
    facts = {"dtype": dtype_name(dtype), "files": dtype_name(of_files), "why": why}
    _log.info("an element type was chosen for the model", extra=facts)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return float32, float16 or bfloat16."""
    return str(dtype).removeprefix("torch.")


def files_dtype(report: ModelReport) -> torch.dtype:
    """Return the element type of most of the UNet's files, by bytes."""
    sizes = report.parts["unet"].bytes_by_dtype
    return _FILE_DTYPES.get(max(sizes, key=lambda name: sizes[name]), torch.float32)


def probe_times() -> ProbeTimes:
    """Measure a linear layer and a convolution in both element types, for a fraction of a second each."""
    return ProbeTimes(float32_s=_seconds(torch.float32), bfloat16_s=_seconds(torch.bfloat16))


def _pick_for_cpu(float32_bytes: int) -> tuple[torch.dtype, str]:
    """Return the faster element type, and the reason for it.

    Args:
        float32_bytes: Size of the weights in float32.
    """
    left_bytes = available_bytes()
    if left_bytes is not None and float32_bytes > _MEMORY_SHARE * left_bytes:
        needed_gb, left_gb = float32_bytes / 1e9, left_bytes / 1e9
        return torch.bfloat16, f"its weights take {needed_gb:.1f} GB in float32, and {left_gb:.1f} GB are available"
    times = probe_times()
    ratio = times.bfloat16_s / times.float32_s
    why = f"bfloat16 takes {ratio:.2f} times as long as float32 on this CPU"
    return (torch.float32 if ratio > _WORTH else torch.bfloat16), why


@torch.inference_mode()
def _seconds(dtype: torch.dtype) -> float:
    """Return the shortest time of one round, because other processes may use the processor too."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    tokens, matrix = drawn(_TOKENS, _WIDTH), drawn(_WIDTH, _WIDTH)
    image, kernel = drawn(1, _CHANNELS, _SIDE, _SIDE), drawn(_CHANNELS, _CHANNELS, 3, 3)

    def run() -> None:
        functional.linear(tokens, matrix)
        functional.conv2d(image, kernel, padding=1)

    return _shortest(run)


def _shortest(run: Callable[[], None], clock: Callable[[], float] = time.perf_counter) -> float:
    began_s, taken_s = clock(), list[float]()
    while len(taken_s) <= _ROUNDS and (len(taken_s) < 2 or clock() - began_s < _PROBE_S):
        round_s = clock()
        run()
        taken_s.append(clock() - round_s)
    return min(taken_s[1:])  # The first includes one-time work.
