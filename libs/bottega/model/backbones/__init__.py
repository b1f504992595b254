"""The denoising networks that are served, each in blocks: a module for each family of networks."""

from diffusers import FluxTransformer2DModel, ModelMixin, UNet2DConditionModel, ZImageTransformer2DModel

from bottega.model.backbones.flux import FluxBackbone
from bottega.model.backbones.stable_diffusion_3 import Sd3Backbone
from bottega.model.backbones.unet import UNetBackbone
from bottega.model.backbones.z_image import ZImageBackbone

MadeBackbone = UNetBackbone | Sd3Backbone | FluxBackbone | ZImageBackbone
"""The backbones of models that are loaded."""


def make_backbone(network: ModelMixin) -> MadeBackbone:
    """Return the blocks of a denoising network."""
    if isinstance(network, UNet2DConditionModel):
        return UNetBackbone(network)
    if isinstance(network, ZImageTransformer2DModel):
        return ZImageBackbone(network)
    return FluxBackbone(network) if isinstance(network, FluxTransformer2DModel) else Sd3Backbone(network)
