"""Residual blocks of which all is computed, on a CPU: the module's own layers, and in between nothing is copied.

Between two convolutions every small operation reads and writes a feature map of megabytes. Diffusers' block writes a
new one each time, and divides by a scale that is 1.
"""

from __future__ import annotations

from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn
from torch.nn import functional


def is_plain(resnet: ResnetBlock2D) -> bool:
    """One that adds the time's embedding, and does not change the size."""
    return resnet.time_embedding_norm == "default" and not (resnet.upsample or resnet.downsample)


def computes_in_place(resnet: ResnetBlock2D, hidden: Tensor) -> bool:
    """Whether `residual` computes it, bit for bit as the module does. On other devices that has kernels of its own."""
    return is_plain(resnet) and type(resnet.nonlinearity) is nn.SiLU and hidden.device.type == "cpu"


def residual(resnet: ResnetBlock2D, hidden: Tensor, embedding: Tensor) -> Tensor:
    """What the block makes of a feature map [rows, channels, height, width], which stays as it is.

    embedding: [rows, channels] of the timestep. Layers are called as modules, so that what is hooked to them counts.
    """
    made: Tensor = resnet.conv1(functional.silu(resnet.norm1(hidden), inplace=True))
    if resnet.time_emb_proj is not None:
        embedding = embedding if resnet.skip_time_act else functional.silu(embedding)
        made.add_(resnet.time_emb_proj(embedding)[:, :, None, None])
    made = resnet.conv2(resnet.dropout(functional.silu(resnet.norm2(made), inplace=True)))
    made.add_(hidden if resnet.conv_shortcut is None else resnet.conv_shortcut(hidden))
    return made if resnet.output_scale_factor == 1.0 else made.div_(resnet.output_scale_factor)
