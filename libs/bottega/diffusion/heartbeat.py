"""Signs of life from inside a long turn, so that one that is slow is not taken for one that hangs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import Attention
from diffusers.models.resnet import ResnetBlock2D
from torch import nn
from transformers.models.clip.modeling_clip import CLIPEncoderLayer

# Large enough to be few (about a hundred in SDXL's UNet), small enough to end within seconds on a slow machine.
_BLOCKS = (Attention, BasicTransformerBlock, CLIPEncoderLayer, ResnetBlock2D)


class Heartbeat:
    """What takes long in the engine's thread calls `beat` often; it calls all subscribers, which must be quick."""

    def __init__(self) -> None:
        self._subscribers: list[Callable[[], None]] = []

    def subscribe(self, subscriber: Callable[[], None]) -> None:
        """Calls this at every beat from now on."""
        self._subscribers.append(subscriber)

    def beat(self) -> None:
        """The thread lives."""
        for subscriber in self._subscribers:
            subscriber()


def call_after_blocks(networks: Iterable[nn.Module], callback: Callable[[], None]) -> None:
    """Calls this each time a block of one of the networks has run. It must be quick."""

    def hook(*_: object) -> None:
        callback()

    for network in networks:
        for module in network.modules():
            if isinstance(module, _BLOCKS):
                module.register_forward_hook(hook)
