"""Checks whether a model's folder can be served, as workers do before they start, and the ControlNets in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bottega.client.types.checks import CheckResult, fail, ok, warn
from bottega.miniature import WEIGHTS
from bottega.model_files import ModelReport, check_model_folder, folder_of
from bottega.model_files.controlnet_folder import check_controlnet
from bottega.model_files.controlnet_layout import ControlLayout, read_base_layout
from bottega.model_files.own_files import own_controlnets

_TODO = "Workers do not start with it. Correct it, or check another folder: bottega doctor --model FOLDER"


def check_model(model: str) -> Iterator[CheckResult]:
    """Check the folder `model`, or the embedded "miniature"; each problem is a result."""
    report = check_model_folder(folder_of(model))
    for problem in report.problems:
        yield fail(f"model {model}: {problem}", _TODO)
    if not report.problems:
        yield ok(f"model {model}: {_described(report)}")
    if report.advice:
        yield warn(f"model {model} has no preset", f"{report.advice[0].upper()}{report.advice[1:]}.")


def _described(report: ModelReport) -> str:
    """Return such as "SDXL, 64 x 64 pixels; 4 files of weights in F16, 4.3 million parameters, 8.3 MiB"."""
    parts = report.parts.values()
    sizes = Counter[str]()
    for part in parts:
        sizes.update(part.bytes_by_dtype)
    dtypes = " and ".join(dtype for dtype, _ in sizes.most_common() if dtype not in {"I64", "I32"})
    variant = f" (variant {report.variant})" if report.variant else ""
    size, files = report.default_size, sum(len(part.files) for part in parts)
    millions = sum(part.parameters for part in parts) / 1e6
    return (
        f"{report.family}, {size} x {size} pixels; {files} files of weights{variant} in {dtypes}, "
        f"{millions:.1f} million parameters, {report.size_bytes / 2**20:.1f} MiB"
    )


_CONTROLNET_TODO = "Requests cannot use it. Correct it, or remove it from the model's folder controlnets."


def check_own_controlnets(model: str) -> Iterator[CheckResult]:
    """Check the ControlNets of the folder `model`, or of the embedded "miniature"."""
    folder = WEIGHTS if model == "miniature" else Path(model)
    own, base = own_controlnets(folder), _base(folder)
    good = []
    for name, path in own.hosted.items():
        if reason := check_controlnet(name, Path(path), base):
            yield warn(reason, _CONTROLNET_TODO)
        else:
            good.append(name)
    for name, reason in own.left_out.items():
        yield warn(f"controlnets/{name} of {model}: {reason}", _CONTROLNET_TODO)
    if good:
        yield ok(f"{len(good)} ControlNet{'' if len(good) == 1 else 's'} of {model} can be used: {', '.join(good)}")


def _base(folder: Path) -> ControlLayout | None:
    """Return the model's layout; None if its configurations cannot be read, which check_model reports."""
    try:
        return read_base_layout(folder)
    except (OSError, KeyError, ValueError, TypeError, AttributeError):
        return None
