"""Images in and out of the suite: decoded and encoded in processes of their own, within limits."""

from bottega.codec.limits import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS
from bottega.codec.pixels import Crop, DecodedEdit, DecodedImage, ImageFacts, ImageSize, MaskOrder, Overlay, Pixels
from bottega.codec.pool import CodecPool, EncodedImage

__all__ = [
    "MAX_IMAGE_BYTES",
    "MAX_IMAGE_PIXELS",
    "CodecPool",
    "Crop",
    "DecodedEdit",
    "DecodedImage",
    "EncodedImage",
    "ImageFacts",
    "ImageSize",
    "MaskOrder",
    "Overlay",
    "Pixels",
]
