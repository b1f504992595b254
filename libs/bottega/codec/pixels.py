"""Values of the codec: sizes, pixels, masks of edits, and overlays."""

from __future__ import annotations

from dataclasses import dataclass, field

from bottega.v1.generation_pb2 import MaskUse


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSize:
    """The size of an image in pixels, after its EXIF orientation is applied."""

    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pixels:
    """An image as uint8 [height, width, 3], row-major RGB."""

    width: int
    height: int
    data: bytes

    def __post_init__(self) -> None:
        if self.width < 1 or self.height < 1 or len(self.data) != self.width * self.height * 3:
            raise ValueError(f"{len(self.data)} bytes are not {self.width}x{self.height} RGB pixels")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """Facts about an image file besides its colours; see the protobuf message of the same name."""

    size: ImageSize
    transparent: bool = False
    scaled_from_16_bits: bool = False
    icc_profile: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedImage:
    """An image, decoded at the requested size, with facts about its file."""

    pixels: Pixels
    facts: ImageFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskOrder:
    """Parameters by which an edit reads its mask."""

    width: int
    """Width at which the image is drawn, in pixels."""
    height: int
    latent_scale: int
    """Pixels per element of the latent, along a side."""
    alpha: bool = False
    """Whether the transparent part is redrawn, instead of the white part."""
    padding: int | None = None
    """Pixels of the image around the mask that are drawn with it; None draws the whole image."""
    image_size: ImageSize | None = None
    """Size of the image. Required if `padding` is set."""
    token: int = 0
    """Elements of the latent per token of the finest attention level, along a side; 0 leaves out `computed_share`."""
    margin: int = 0
    """Tokens around the mask that masked blocks compute as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crop:
    """A part of an image of size `image_size`, in pixels."""

    x: int
    y: int
    width: int
    height: int
    image_size: ImageSize


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedEdit:
    """An edit's image and mask at the size at which the edit is drawn."""

    pixels: Pixels
    mask: bytes = field(repr=False)
    """uint8 [height, width], row-major: 1 where the pixels are redrawn, else 0."""
    use: MaskUse
    """Facts about the mask, without its digest."""
    facts: ImageFacts

    @property
    def crop(self) -> Crop | None:
        """The part of the image that is drawn; None for the whole image."""
        use = self.use
        if not use.crop_width:
            return None
        return Crop(
            x=use.crop_x, y=use.crop_y, width=use.crop_width, height=use.crop_height, image_size=self.facts.size
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """An image into which the drawn pixels of an edit are pasted."""

    image: bytes = field(repr=False)
    """The encoded image."""
    mask: bytes = field(repr=False)
    """The encoded mask."""
    order: MaskOrder
    """Parameters by which the mask is read; `image_size` is ignored."""
    keep_unmasked: bool = True
    """Whether the image's pixels and their transparency are kept outside the mask. Otherwise only a crop is pasted
    back, as in Diffusers.
    """
    feather: int = 0
    """Pixels over which the drawn pixels, which are opaque, fade into kept ones."""
