"""The worker's settings for edits. The module imports no torch, because the worker's front reads it too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from bottega.strict import STRICT

NotNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EditsConfig:
    """Settings for edits that reuse recorded activations."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    former_engine_keys: ClassVar[Mapping[str, str]] = {
        "activations_mib": "edits.activations_mib",
        "activations_template_mib": "edits.template_mib",
        "activations_upload_mib": "edits.upload_mib",
        "activations_silence_s": "edits.silence_s",
        "mask_margin": "edits.mask_margin",
        "sparse_convolutions": "edits.sparse_convolutions",
    }
    """Former keys of the engine's settings, and the keys here that replaced them."""

    activations_mib: NotNegative = 512
    """Maximum MiB of recorded activations of edited images in the worker's memory, which later edits reuse.

    This includes activations loaded from activation stores on other hosts. 0: record nothing and use no store."""
    template_mib: NotNegative = 0
    """Maximum MiB of the recorded activations of one image.

    If all blocks of the model take more, only the blocks that save the most time per byte are recorded. 0: as
    activations_mib."""
    upload_mib: NotNegative = 512
    """Maximum MiB of recordings that wait to be sent to an activation store.

    A recording that the store has no space for stays in this worker."""
    silence_s: Seconds = 5.0
    """Seconds without a message after which an activation store counts as dead."""
    mask_margin: Annotated[int, Field(ge=0, le=64)] = 1
    """Width of the margin around the mask that an edit computes as well, in tokens of the finest attention level."""
    sparse_convolutions: bool = True
    """Whether edits that reuse activations also restrict convolutions to the area around the mask.

    This is faster for small masks, and doubles the bytes of each recording."""
