"""Regional compilation: the network's repeated blocks by torch.compile, each kind once, for every shape that comes.

Compiled code does not see hooks of layers, and LoRAs beside the weights are such: a block with one runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from torch import nn

from bottega.diffusion.acceleration.forwards import Forwards
from bottega.diffusion.model.model import Model

_REGIONS = (BasicTransformerBlock, ResnetBlock2D)


class RegionalCompile:
    """backend: of torch.compile. Blocks of one kind and one set of shapes are compiled once.

    tolerance: fused operators keep what lies between them in float32.
    """

    name = "compile"
    probe = "forward"
    tolerance = 0.02
    excludes: Sequence[str] = ("graphs", "kernels.geglu", "kernels.group_norm_silu")

    def __init__(self, backend: str = "inductor") -> None:
        self._backend = backend
        self._forwards = Forwards()

    def unsupported(self, model: Model) -> str:
        if model.device.type != "cuda" and self._backend == "inductor":
            return f"it is for CUDA devices, and the model is on {model.device.type}"
        return "" if any(_regions(model)) else "the network has no block that is known"

    def enable(self, model: Model) -> None:
        for module in _regions(model):
            compiled = torch.compile(module.forward, backend=self._backend)
            self._forwards.replace(module, _forward(module, compiled))

    def disable(self) -> None:
        self._forwards.restore()


def _forward(module: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled where none of the block's layers has a hook now."""
    plain, layers = module.forward, [each for each in module.modules() if each is not module]

    def forward(*inputs: Any, **options: Any) -> Any:
        hooked = any(each._forward_hooks or each._forward_pre_hooks for each in layers)
        return (plain if hooked else compiled)(*inputs, **options)

    return forward


def _regions(model: Model) -> Iterator[nn.Module]:
    for module in model.backbone.unet.modules():
        if type(module) in _REGIONS:
            yield module
