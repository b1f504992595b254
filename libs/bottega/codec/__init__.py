"""Decodes and encodes images in separate processes with limits on memory and time."""

from bottega.codec.pixels import Crop, DecodedEdit, DecodedImage, ImageFacts, ImageSize, MaskOrder, Overlay, Pixels
from bottega.codec.structure import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS

__all__ = [
    "MAX_IMAGE_BYTES",
    "MAX_IMAGE_PIXELS",
    "Crop",
    "DecodedEdit",
    "DecodedImage",
    "ImageFacts",
    "ImageSize",
    "MaskOrder",
    "Overlay",
    "Pixels",
]
