"""Signs of life from inside a long turn, so that one that is slow is not taken for one that hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import monotonic

from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import Attention
from diffusers.models.resnet import ResnetBlock2D
from torch import nn
from transformers.models.clip.modeling_clip import CLIPEncoderLayer

# Large enough to be few (about a hundred in SDXL's UNet), small enough to end within seconds on a slow machine.
_COVERED_BEAT_S = 1.0
_BLOCKS = (Attention, BasicTransformerBlock, CLIPEncoderLayer, ResnetBlock2D)


class Heartbeat:
    """What takes long in the engine's thread calls `beat` often; it calls all subscribers, which must be quick."""

    def __init__(self) -> None:
        self._subscribers: list[Callable[[], None]] = []
        self._covered_subscribers: list[Callable[[], None]] = []

    def subscribe(self, subscriber: Callable[[], None]) -> None:
        """Calls this at every beat from now on."""
        self._subscribers.append(subscriber)

    def unsubscribe(self, subscriber: Callable[[], None]) -> None:
        """Stop calling this, in whichever way it is called."""
        for subscribers in (self._subscribers, self._covered_subscribers):
            while subscriber in subscribers:
                subscribers.remove(subscriber)

    def beat(self) -> None:
        """The thread lives."""
        for subscriber in self._subscribers:
            subscriber()

    def subscribe_covered(self, subscriber: Callable[[], None]) -> None:
        """Calls this, in a thread of its own, from time to time while something is covered."""
        self._covered_subscribers.append(subscriber)

    @contextmanager
    def covering(self, deadline_s: float) -> Iterator[None]:
        """The thread may be silent in this block for so long, because it compiles; beyond that it counts as hung.

        A compiler runs no blocks, so nothing beats from inside it.
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
    """Calls this each time a block of one of the networks has run. It must be quick.

    Of blocks in one another only the outermost: see acceleration.compiled, which leaves alone what has hooks inside.
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
    for child in module.children():
        yield from _outermost_blocks(child)
