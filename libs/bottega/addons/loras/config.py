"""The worker's settings for LoRAs. The module imports no torch, because the worker's front reads it too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from bottega.strict import STRICT

AtLeastOne = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LorasConfig:
    """Settings for LoRAs in a worker."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    former_engine_keys: ClassVar[Mapping[str, str]] = {
        "lora_budget_bytes": "loras.budget_bytes",
        "lora_timeout_s": "loras.timeout_s",
        "lora_silence_s": "loras.silence_s",
        "lora_pristine": "loras.pristine",
        "lora_merge_half_precision": "loras.merge_half_precision",
    }
    """Former keys of the engine's settings, and the keys here that replaced them."""

    budget_bytes: AtLeastOne = 1 << 30
    """Maximum bytes of cached LoRAs, in addition to those that requests are waiting for.

    Batches whose requests have several LoRAs may use half as much again. On a GPU both together use at most a quarter
    of the memory that the model leaves."""
    timeout_s: Seconds = 60.0
    """Seconds that a request waits for its LoRAs."""
    silence_s: Seconds = 5.0
    """Seconds without a message after which a LoRA store counts as dead."""
    pristine: Literal["device", "host"] = "device"
    """Where the original weights are kept while LoRAs are merged into them: in memory of the device or of the host.

    The copies take as many bytes as the weights that the LoRAs change."""
    merge_half_precision: bool = False
    """Whether LoRAs may be merged into float16 and bfloat16 weights when that saves time.

    Merged weights round differently from stock Diffusers, so such pictures are marked as not exact. If false, LoRAs in
    half precision are computed beside the weights, as in stock Diffusers."""
