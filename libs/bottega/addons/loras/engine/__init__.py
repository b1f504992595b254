"""LoRAs in the engine: their layers, their source, and two ways to apply them: beside the weights, or merged."""

from bottega.addons.loras.engine.lora import (
    Layers,
    LoraAtScale,
    LoraHandle,
    LoraLayer,
    LoraRef,
    LoraSource,
    WholeLayer,
    is_only_low_rank,
    left_out_by_stock,
    make_layer,
    stock_merges_alphas,
)
from bottega.addons.loras.engine.lora_set import make_set, set_key
from bottega.addons.loras.engine.patching import Patcher, SwapCosts
from bottega.addons.loras.engine.unmerged import UnmergedLoras
from bottega.addons.loras.engine.weights import LoraWeights
from bottega.model.rows import Factors, LoraSet, SetKey

__all__ = [
    "Factors",
    "Layers",
    "LoraHandle",
    "LoraLayer",
    "LoraRef",
    "LoraSet",
    "LoraSource",
    "LoraAtScale",
    "LoraWeights",
    "WholeLayer",
    "Patcher",
    "SetKey",
    "UnmergedLoras",
    "SwapCosts",
    "stock_merges_alphas",
    "is_only_low_rank",
    "left_out_by_stock",
    "make_layer",
    "make_set",
    "set_key",
]
