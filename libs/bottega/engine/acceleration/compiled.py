"""Regional compilation: torch.compile for the network's repeated blocks. Each kind of block is compiled once per shape.

Compiled code ignores hooks of layers, and some LoRAs are applied by hooks. So a block with hooks runs uncompiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from torch import nn

from bottega.engine.acceleration.forwards import Forwards
from bottega.model.model import Model

_REGIONS = (BasicTransformerBlock, ResnetBlock2D)


class RegionalCompile:
    """Compiles the network's blocks. Blocks of the same kind share compiled code for the same shapes."""

    name = "compile"
    probe = "forward"
    tolerance = 0.02
    """Fused operators keep intermediate values in float32, and the plain path rounds them."""
    excludes: Sequence[str] = ("graphs", "kernels.geglu", "kernels.group_norm_silu")

    def __init__(self, backend: str = "inductor") -> None:
        self._backend = backend
        self._forwards = Forwards()

    def unsupported(self, model: Model) -> str:
        if model.device.type != "cuda" and self._backend == "inductor":
            return f"it needs a CUDA device, and the model is on {model.device.type}"
        return "" if any(_regions(model)) else "the network has no block of a known kind"

    def enable(self, model: Model) -> None:
        for module in _regions(model):
            compiled = torch.compile(module.forward, backend=self._backend)
            self._forwards.replace(module, _forward(module, compiled))

    def disable(self) -> None:
        self._forwards.restore()


def _forward(module: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of the block's forward: compiled, or the block's own while a layer of it has a hook."""
    plain, layers = module.forward, [layer for layer in module.modules() if layer is not module]

    def forward(*inputs: Any, **options: Any) -> Any:
        hooked = any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
        return (plain if hooked else compiled)(*inputs, **options)

    return forward


def _regions(model: Model) -> Iterator[nn.Module]:
    for module in model.backbone.unet.modules():
        if type(module) in _REGIONS:
            yield module
