"""Checks the ControlNets in a model's own folder: configurations, headers, and whether they fit the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bottega.client.types.checks import CheckResult, ok, warn
from bottega.miniature import WEIGHTS
from bottega.model_files.controlnet_folder import check_controlnet
from bottega.model_files.controlnet_layout import ControlLayout, read_base_layout
from bottega.model_files.own_files import own_controlnets

_TODO = "Requests cannot use it. Correct it, or take it out of the model's folder controlnets."


def check_own_controlnets(model: str) -> Iterator[CheckResult]:
    """Check the ControlNets of the folder `model`, or of the embedded "miniature"."""
    folder = WEIGHTS if model == "miniature" else Path(model)
    own, base = own_controlnets(folder), _base(folder)
    good = []
    for name, path in own.hosted.items():
        if reason := check_controlnet(name, Path(path), base):
            yield warn(reason, _TODO)
        else:
            good.append(name)
    for name, reason in own.left_out.items():
        yield warn(f"controlnets/{name} of {model}: {reason}", _TODO)
    if good:
        yield ok(f"{len(good)} ControlNet{'' if len(good) == 1 else 's'} of {model} can be used: {', '.join(good)}")


def _base(folder: Path) -> ControlLayout | None:
    """Return the model's layout; None where its configurations cannot be read, which is not a ControlNet's fault."""
    try:
        return read_base_layout(folder)
    except (OSError, KeyError, ValueError, TypeError, AttributeError):
        return None
