"""Values of the codec: sizes, pixels, masks of edits, and overlays."""

from __future__ import annotations

from dataclasses import dataclass, field

from bottega.v1.generation_pb2 import MaskUse


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSize:
    """The size of an image in pixels, after the rotation in its EXIF data."""

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
    """Properties of an image file besides its colours; see the protobuf message of the same name."""

    size: ImageSize
    transparent: bool = False
    scaled_from_16_bits: bool = False
    icc_profile: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedImage:
    """An image, decoded in the requested size, and the properties of its file."""

    pixels: Pixels
    facts: ImageFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskOrder:
    """Parameters that say how an edit uses its mask."""

    width: int
    """Width at which the image is drawn, in pixels."""
    height: int
    latent_scale: int
    """Pixels per element of the latent, along each side."""
    alpha: bool = False
    """Whether the transparent part is redrawn, instead of the white part."""
    padding: int | None = None
    """Pixels of the image around the mask that are drawn, too; None draws the whole image."""
    image_size: ImageSize | None = None
    """Size of the image; required if `padding` is set."""
    token: int = 0
    """Side length, in elements of the latent, of a token at the finest attention level; 0 to omit `computed_share`."""
    margin: int = 0
    """Width, in tokens, of the margin around the mask that is computed, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crop:
    """A part of an image, in pixels. The whole image has the size `image_size`."""

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
    """Properties of the mask, without its digest."""
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
    """Parameters that say how the mask is used; `image_size` is ignored."""
    keep_unmasked: bool = True
    """Whether pixels outside the mask are those of the image, with their transparency. If False, only a cropped part is
    pasted into the image, as in Diffusers."""
    feather: int = 0
    """Width in pixels of the border in which the drawn pixels, which are opaque, fade into those of the image."""
