"""LoRAs by the side path: per-row low-rank products beside untouched weights.

The base mechanism by which rows with different LoRAs, or none, share one forward (after S-LoRA).
Knows modules and rows' places; knows no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from bottega.diffusion.lora import LoraLayer, LoraUse


class SidePath:
    """Adds each row's LoRAs to the outputs of the modules they touch, for one forward at a time."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def enter(self, uses: Sequence[tuple[LoraUse, ...]]) -> None:
        """Makes row i use uses[i], in place of what was entered before.

        Raises KeyError when a LoRA names a module that the network does not have.
        """
        self.leave()
        touched: dict[str, list[tuple[int, LoraLayer, float]]] = {}
        for row, loras in enumerate(uses):
            for use in loras:
                for path, layer in use.layers.items():
                    touched.setdefault(path, []).append((row, layer, use.scale * layer.scale))
        for path, terms in touched.items():
            module = self._module(path)
            self._handles.append(module.register_forward_hook(_adder(module, terms)))

    def leave(self) -> None:
        """Back to the untouched forward."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _module(self, path: str) -> nn.Module:
        try:
            return self._network.get_submodule(path)
        except AttributeError:
            raise KeyError(f"the network has no module {path}") from None


def _adder(
    module: nn.Module, terms: list[tuple[int, LoraLayer, float]]
) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
    product = _convolved if isinstance(module, nn.Conv2d) else _projected

    def add(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        # The output is this module's own fresh tensor, and nobody else has seen it yet.
        for row, layer, scale in terms:
            output[row] += product(module, inputs[0][row], layer) * scale
        return output

    return add


def _projected(_: nn.Module, x: Tensor, layer: LoraLayer) -> Tensor:
    return functional.linear(functional.linear(x, layer.down.to(x)), layer.up.to(x))


def _convolved(module: nn.Module, x: Tensor, layer: LoraLayer) -> Tensor:
    assert isinstance(module, nn.Conv2d)
    down = functional.conv2d(
        x[None],
        layer.down.to(x),
        None,
        module.stride,
        module.padding,
        module.dilation,
    )
    return functional.conv2d(down, layer.up.to(x))[0]
