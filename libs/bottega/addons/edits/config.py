"""The worker's settings of edits. The module imports no torch, because the worker's front reads it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from bottega.strict import STRICT

NotNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EditsConfig:
    """Settings of edits that reuse recorded activations."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    activations_mib: NotNegative = 512
    """Bound in MiB on recorded activations of edited images, which later edits use again.

    It includes those loaded from activation stores of other hosts. 0: record nothing and use no store.
    """
    template_mib: NotNegative = 0
    """Bound in MiB on the activations of one image.

    Beyond it only the blocks that save most time are recorded. 0: as activations_mib.
    """
    upload_mib: NotNegative = 512
    """Bound in MiB on recordings that wait to be sent to a store.

    A recording for which the store has no room stays in this worker.
    """
    silence_s: Seconds = 5.0
    """Seconds of silence after which an activation store counts as dead."""
    mask_margin: Annotated[int, Field(ge=0, le=64)] = 1
    """Tokens around a mask, at the finest level of attention, that masked blocks compute as well."""
    sparse_convolutions: bool = True
    """Let masked blocks of edits convolve only around the mask.

    It is faster for small masks and doubles the bytes of each recording.
    """
