"""Attention by one of PyTorch's backends, or by the package flash_attn if it is installed.

PyTorch chooses a backend by the sizes alone. The fastest one also depends on the device and its libraries, so the
self-check tries each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend

from bottega.model.model import Model

_HALVES = frozenset({torch.float16, torch.bfloat16})
# Largest number of channels of a head that FlashAttention supports.
_MOST_HEAD_CHANNELS = 256

Attention = Callable[..., Tensor]


class AttentionBackend:
    """Makes PyTorch prefer one of its attention backends: flash, efficient or cudnn. The others remain as fallbacks.

    No backend is switched off: a VAE has one head of 512 channels, which two of them do not support, and the memory of
    the plain backend grows with the square of the number of pixels.
    """

    probe = "forward"
    # Backends sum in different orders and round to half precision, in seventy consecutive blocks.
    tolerance = 0.02

    def __init__(self, way: str) -> None:
        self.name = f"attention.{way}"
        self.excludes: Sequence[str] = tuple(name for name in ATTENTIONS if name != self.name)
        self._way = way
        self._before: list[int] | None = None

    def unsupported(self, model: Model) -> str:
        if model.device.type != "cuda":
            return f"it needs a CUDA device, and the model is on {model.device.type}"
        if self._way in {"flash", "cudnn"} and model.dtype not in _HALVES:
            return f"it computes in float16 and bfloat16, and the model is {model.dtype_name}"
        return ""

    def enable(self, model: Model) -> None:
        # torch sets its own order at the first attention of a process on a device. The check's plain runs came before.
        self._before = torch._C._get_sdp_priority_order()
        first = _WAYS[self._way]
        torch._C._set_sdp_priority_order([first, *(way for way in self._before if way != first)])

    def disable(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            torch._C._set_sdp_priority_order(before)


class FlashAttention:
    """Uses the package flash_attn instead of PyTorch's attention wherever it supports the inputs."""

    name = "attention.flash_attn"
    probe = "forward"
    tolerance = 0.02

    def __init__(self) -> None:
        self.excludes: Sequence[str] = tuple(name for name in ATTENTIONS if name != self.name)
        self._plain: Attention | None = None

    def unsupported(self, model: Model) -> str:
        if model.device.type != "cuda":
            return f"it needs a CUDA device, and the model is on {model.device.type}"
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
    """Return PyTorch's attention function, which calls FlashAttention for inputs that it supports."""

    def attention(  # noqa: PLR0917 - the parameters of the function that it replaces
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        more = attn_mask is not None or dropout_p or is_causal or any(option is not None for option in options.values())
        if more or query.dim() != 4 or query.dtype not in _HALVES or query.shape[-1] > _MOST_HEAD_CHANNELS:
            return plain(query, key, value, attn_mask, dropout_p, is_causal, **options)
        return flash(*(tensor.transpose(1, 2) for tensor in (query, key, value))).transpose(1, 2)

    return attention


_WAYS: dict[str, int] = {
    "flash": SDPBackend.FLASH_ATTENTION.value,
    "efficient": SDPBackend.EFFICIENT_ATTENTION.value,
    "cudnn": SDPBackend.CUDNN_ATTENTION.value,
}
ATTENTIONS = ("attention.flash_attn", "attention.cudnn", "attention.flash", "attention.efficient")
