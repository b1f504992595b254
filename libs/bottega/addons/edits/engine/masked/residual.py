"""Residual blocks on a CPU, with the module's own layers and in-place operations between them."""

from __future__ import annotations

from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn
from torch.nn import functional


def is_plain(resnet: ResnetBlock2D) -> bool:
    """Return whether a block adds the time embedding and keeps the size."""
    return resnet.time_embedding_norm == "default" and not (resnet.upsample or resnet.downsample)


def computes_in_place(resnet: ResnetBlock2D, hidden: Tensor) -> bool:
    """Return whether `residual` computes a block bit for bit. Only on CPUs, because GPUs use other kernels."""
    return is_plain(resnet) and type(resnet.nonlinearity) is nn.SiLU and hidden.device.type == "cpu"


def residual(resnet: ResnetBlock2D, hidden: Tensor, embedding: Tensor) -> Tensor:
    """Compute a residual block of a feature map [rows, channels, height, width], which is not changed.

    Layers are called as modules, so that their hooks run. `embedding` is that of the time, [rows, channels].
    """
    made: Tensor = resnet.conv1(functional.silu(resnet.norm1(hidden), inplace=True))
    if resnet.time_emb_proj is not None:
        embedding = embedding if resnet.skip_time_act else functional.silu(embedding)
        made.add_(resnet.time_emb_proj(embedding)[:, :, None, None])
    made = resnet.conv2(resnet.dropout(functional.silu(resnet.norm2(made), inplace=True)))
    made.add_(hidden if resnet.conv_shortcut is None else resnet.conv_shortcut(hidden))
    return made if resnet.output_scale_factor == 1.0 else made.div_(resnet.output_scale_factor)
