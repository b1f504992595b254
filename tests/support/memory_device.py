"""A CPU that has an allocator's memory: forwards and decodings are refused by what they would take there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bottega.device.devices import CpuDevice
from bottega.model.model import Model


class MemoryDevice(CpuDevice):
    """size_bytes: it has. held_bytes: of other processes. limit_bytes: for this process, where one was set.

    Whoever computes on it calls `take`.
    """

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        self.size_bytes = size_bytes
        self.held_bytes = 0
        self.limit_bytes: int | None = None
        self._peak_bytes = 0

    def free_bytes(self) -> int | None:
        return self.size_bytes - self.held_bytes

    def total_bytes(self) -> int | None:
        return self.size_bytes

    def limit_memory(self, size_bytes: int) -> None:
        self.limit_bytes = size_bytes

    def measure_peak(self, run: Callable[[], object]) -> int | None:
        self._peak_bytes = 0
        run()
        return self._peak_bytes

    def take(self, size_bytes: int) -> None:
        """Something needs so much for a moment. Raises torch.OutOfMemoryError, as a GPU's allocator does."""
        if size_bytes > (self.limit_bytes or self.size_bytes):
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size_bytes} bytes")
        self._peak_bytes = max(self._peak_bytes, size_bytes)


@contextmanager
def taking(device: MemoryDevice, model: Model, *, row_bytes: int, decoding_bytes: int) -> Iterator[list[int]]:
    """In the block the model's forwards take row_bytes of the device for each row and latent element, its VAE's decoder
    decoding_bytes for each element. Yields the rows of each forward that was let through."""
    widths: list[int] = []

    def forward(_: object, inputs: tuple[Tensor, ...]) -> None:
        rows, _, height, width = inputs[0].shape
        device.take(rows * height * width * row_bytes)
        widths.append(rows)

    def decode(_: object, inputs: tuple[Tensor, ...]) -> None:
        _, _, height, width = inputs[0].shape
        device.take(height * width * decoding_bytes)

    hooks = [
        model.backbone.network.conv_in.register_forward_pre_hook(forward),
        model.vae.decoder.conv_in.register_forward_pre_hook(decode),
    ]
    try:
        yield widths
    finally:
        for hook in hooks:
            hook.remove()
