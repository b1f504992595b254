"""LoRAs in the engine: their layers, their source, and two ways to apply them: beside the weights, or merged."""

from bottega.addons.loras.engine.lora import (
    TEXT_ENCODERS,
    UNET,
    Layers,
    LoraAtScale,
    LoraHandle,
    LoraLayer,
    LoraRef,
    LoraSource,
    has_mixed_alphas,
    left_out_by_stock,
)
from bottega.addons.loras.engine.lora_set import make_set, set_key
from bottega.addons.loras.engine.patching import Patcher
from bottega.addons.loras.engine.unmerged import UnmergedLoras
from bottega.addons.loras.engine.weights import LoraWeights, SwapCosts
from bottega.model.rows import Factors, LoraSet, SetKey

__all__ = [
    "TEXT_ENCODERS",
    "UNET",
    "Factors",
    "Layers",
    "LoraHandle",
    "LoraLayer",
    "LoraRef",
    "LoraSet",
    "LoraSource",
    "LoraAtScale",
    "LoraWeights",
    "Patcher",
    "SetKey",
    "UnmergedLoras",
    "SwapCosts",
    "has_mixed_alphas",
    "left_out_by_stock",
    "make_set",
    "set_key",
]
