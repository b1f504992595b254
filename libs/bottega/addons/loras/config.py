"""The worker's settings of LoRAs. The module imports no torch, because the worker's front reads it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from bottega.strict import STRICT

AtLeastOne = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LorasConfig:
    """Settings of LoRAs on a worker."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    budget_bytes: AtLeastOne = 1 << 30
    """Bound on the bytes of LoRAs that are kept beside those that requests wait for.

    Groups of requests with several LoRAs may use half as much again. On a GPU both together use at most a quarter of
    the memory that the model leaves.
    """
    timeout_s: Seconds = 60.0
    """Seconds for which a request waits for its LoRAs."""
    silence_s: Seconds = 5.0
    """Seconds of silence after which a LoRA store counts as dead."""
    pristine: Literal["device", "host"] = "device"
    """Where the original weights are kept while LoRAs are merged into them.

    They take as many bytes as the weights that the LoRAs change.
    """
    merge_half_precision: bool = False
    """Merge LoRAs into float16 and bfloat16 weights when that saves time.

    Merged weights round differently from stock Diffusers, so such pictures say that they are not exact. false: LoRAs in
    half precision are computed beside the weights, as stock does.
    """
