"""Attention by one of PyTorch's own ways, or by FlashAttention where that is installed.

PyTorch picks by the sizes alone; which way is fastest depends on the device and its libraries, so each is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bottega.diffusion.model.model import Model

_HALVES = frozenset({torch.float16, torch.bfloat16})
# Of a head, as FlashAttention has them.
_MOST_HEAD_CHANNELS = 256

Attention = Callable[..., Tensor]


class AttentionBackend:
    """One of PyTorch's ways alone, with the plain one for what it cannot do. way: flash, efficient or cudnn."""

    probe = "forward"
    # Sums in another order, rounded once in half precision, in seventy blocks one behind the other.
    tolerance = 0.02

    def __init__(self, way: str) -> None:
        self.name = f"attention.{way}"
        self.excludes: Sequence[str] = tuple(name for name in ATTENTIONS if name != self.name)
        self._way = way
        self._before: dict[str, bool] | None = None

    def unsupported(self, model: Model) -> str:
        if model.device.type != "cuda":
            return f"it is for CUDA devices, and the model is on {model.device.type}"
        if self._way in {"flash", "cudnn"} and model.dtype not in _HALVES:
            return f"it computes in float16 and bfloat16, and the model is {model.dtype_name}"
        return ""

    def enable(self, model: Model) -> None:
        self._before = {way: is_on() for way, (is_on, _) in _SWITCHES.items()}
        for way, (_, switch) in _SWITCHES.items():
            switch(way in {self._way, "math"})

    def disable(self) -> None:
        before, self._before = self._before, None
        for way, was_on in (before or {}).items():
            _SWITCHES[way][1](was_on)


class FlashAttention:
    """The package flash_attn, in place of PyTorch's attention wherever its conditions hold."""

    name = "attention.flash_attn"
    probe = "forward"
    tolerance = 0.02

    def __init__(self) -> None:
        self.excludes: Sequence[str] = tuple(name for name in ATTENTIONS if name != self.name)
        self._plain: Attention | None = None

    def unsupported(self, model: Model) -> str:
        if model.device.type != "cuda":
            return f"it is for CUDA devices, and the model is on {model.device.type}"
        if find_spec("flash_attn") is None:
            return "flash_attn is not installed"
        if model.dtype not in _HALVES:
            return f"it computes in float16 and bfloat16, and the model is {model.dtype_name}"
        return ""

    def enable(self, model: Model) -> None:
        from flash_attn import flash_attn_func  # type: ignore[import-not-found]

        self._plain = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = _flash(self._plain, flash_attn_func)

    def disable(self) -> None:
        plain, self._plain = self._plain, None
        if plain is not None:
            functional.scaled_dot_product_attention = plain


def _flash(plain: Attention, flash: Attention) -> Attention:
    """PyTorch's function, by FlashAttention for what that can do, whose heads lie behind tokens."""

    def attention(  # noqa: PLR0917 - the parameters of the one that it stands for
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        more = attn_mask is not None or dropout_p or is_causal or any(each is not None for each in options.values())
        if more or query.dim() != 4 or query.dtype not in _HALVES or query.shape[-1] > _MOST_HEAD_CHANNELS:
            return plain(query, key, value, attn_mask, dropout_p, is_causal, **options)
        return flash(*(each.transpose(1, 2) for each in (query, key, value))).transpose(1, 2)

    return attention


_cuda: Any = torch.backends.cuda
_SWITCHES: dict[str, tuple[Callable[[], bool], Callable[[bool], None]]] = {
    "flash": (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    "efficient": (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    "cudnn": (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    "math": (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
}
ATTENTIONS = ("attention.flash_attn", "attention.cudnn", "attention.flash", "attention.efficient")
