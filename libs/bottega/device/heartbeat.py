"""Signs of life during a long forward pass, so that a slow one is not mistaken for a hang."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import monotonic

from diffusers.models.attention import BasicTransformerBlock, FeedForward
from diffusers.models.attention_processor import Attention
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock
from torch import nn
from transformers.models.clip.modeling_clip import CLIPEncoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.models.t5.modeling_t5 import T5Block

_COVERED_BEAT_S = 1.0
# Large enough to be few (about a hundred in SDXL's UNet), small enough to end within seconds on a slow machine.
_BLOCKS = (Attention, BasicTransformerBlock, CLIPEncoderLayer, FeedForward, Qwen3DecoderLayer, ResnetBlock2D, T5Block)


class Heartbeat:
    """Calls all subscribers at every beat. The engine's thread beats often, so subscribers must be quick."""

    def __init__(self) -> None:
        self._subscribers: list[Callable[[], None]] = []
        self._covered_subscribers: list[Callable[[], None]] = []

    def subscribe(self, subscriber: Callable[[], None]) -> None:
        """Call a function at every beat from now on."""
        self._subscribers.append(subscriber)

    def unsubscribe(self, subscriber: Callable[[], None]) -> None:
        """Stop calling a subscriber of either kind."""
        for subscribers in (self._subscribers, self._covered_subscribers):
            while subscriber in subscribers:
                subscribers.remove(subscriber)

    def beat(self) -> None:
        """Call all subscribers, because the thread is alive."""
        for subscriber in self._subscribers:
            subscriber()

    def subscribe_covered(self, subscriber: Callable[[], None]) -> None:
        """Call a function now and then in a thread of its own, while a `covering` context is active."""
        self._covered_subscribers.append(subscriber)

    @contextmanager
    def covering(self, deadline_s: float) -> Iterator[None]:
        """Allow the engine's thread to be silent in the context for `deadline_s`, because it compiles.

        Then it counts as hung.

        A compiler runs no blocks of a network, so nothing beats while it works.
        """
        over = threading.Event()
        until_s = monotonic() + deadline_s

        def tell() -> None:
            while monotonic() < until_s and not over.wait(min(_COVERED_BEAT_S, deadline_s)):
                for subscriber in self._covered_subscribers:
                    subscriber()

        thread = threading.Thread(target=tell, name="compiling", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def call_after_blocks(networks: Iterable[nn.Module], callback: Callable[[], None]) -> None:
    """Call a function each time a block of one of the networks has run. It must be quick.

    Of nested blocks only the outermost counts, because acceleration.compiled does not compile blocks with hooks inside.
    """

    def hook(*_: object) -> None:
        callback()

    for network in networks:
        for block in _outermost_blocks(network):
            block.register_forward_hook(hook)


def _outermost_blocks(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, _BLOCKS):
        yield module
        return
    if isinstance(module, FluxSingleTransformerBlock):
        yield module.act_mlp  # Backbones for rows of several sizes call the block's layers instead of the block.
        return
    for child in module.children():
        yield from _outermost_blocks(child)
