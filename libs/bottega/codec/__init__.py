"""Decodes and encodes images in separate processes with limits on memory and time."""

from bottega.codec.pixels import Crop, DecodedEdit, DecodedImage, ImageFacts, ImageSize, MaskOrder, Overlay, Pixels
from bottega.codec.pool import CodecPool, EncodedImage
from bottega.codec.structure import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS

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
