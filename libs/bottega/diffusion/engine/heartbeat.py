"""Signs of life from inside a long forward, so that a slow turn is not taken for a hang.

Knows networks by the kinds of their blocks; does not know who listens.
"""

from __future__ import annotations

from collections.abc import Callable

from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import Attention
from diffusers.models.resnet import ResnetBlock2D
from torch import nn
from transformers.models.clip.modeling_clip import CLIPEncoderLayer

# Large enough to be few (about a hundred in SDXL's UNet), small enough to end within seconds on a slow machine.
_KINDS = (Attention, BasicTransformerBlock, CLIPEncoderLayer, ResnetBlock2D)


def beat_in(networks: tuple[nn.Module, ...], alive: Callable[[], None]) -> None:
    """Calls `alive` each time a block of one of the networks has run. It must be quick."""

    def hook(*_: object) -> None:
        alive()

    for network in networks:
        for module in network.modules():
            if isinstance(module, _KINDS):
                module.register_forward_hook(hook)
