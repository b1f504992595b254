"""Images as they are before and after: their size, their pixels, and how an edit reads its mask and is put back."""

from __future__ import annotations

from dataclasses import dataclass, field

from bottega.v1.generation_pb2 import MaskUse


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSize:
    """Extent of an image as it is looked at, in pixels."""

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
    """What the file of an image has beside the colours of its pixels; see the message of that name."""

    size: ImageSize
    transparent: bool = False
    scaled_from_16_bits: bool = False
    icc_profile: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedImage:
    """The pixels of an image at the size that was asked for, and what else its file has."""

    pixels: Pixels
    facts: ImageFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskOrder:
    """How an edit reads its mask.

    width, height: at which the image is drawn, in pixels. latent_scale: pixels of an element of the latent, a side.
    alpha: what is transparent is redrawn, instead of what is white.
    padding: pixels around the mask that are drawn with it, in the image's; None draws the whole image.
    image_size: the image's own; needed with padding.
    token: elements of the latent, a side, of a token of the finest attention level; margin: such tokens around a mask
    that are computed with it. With them MaskUse.computed_share is found out; token 0 leaves it out.
    """

    width: int
    height: int
    latent_scale: int
    alpha: bool = False
    padding: int | None = None
    image_size: ImageSize | None = None
    token: int = 0
    margin: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Crop:
    """A part of an image, in the pixels of one of image_size."""

    x: int
    y: int
    width: int
    height: int
    image_size: ImageSize


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedEdit:
    """An edit's image and mask at the size at which it is drawn.

    mask: uint8 [height, width] as `pixels`, 1 where they are redrawn, else 0. use: what the mask was and what it
    redraws, without its digest. facts: of the image.
    """

    pixels: Pixels
    mask: bytes = field(repr=False)
    use: MaskUse
    facts: ImageFacts

    @property
    def crop(self) -> Crop | None:
        """The part of the image that is drawn; None where that is all of it."""
        use = self.use
        if not use.crop_width:
            return None
        return Crop(
            x=use.crop_x, y=use.crop_y, width=use.crop_width, height=use.crop_height, image_size=self.facts.size
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """What the drawn pixels of an edit are put into.

    image, mask: encoded. order: how the mask is read; its image_size is not looked at. keep_unmasked: the image's own
    pixels and their transparency stay outside the mask, and the drawn ones, which are opaque, fade into them over
    `feather` pixels. Without it, only what was cut out is put back, as Diffusers does.
    """

    image: bytes = field(repr=False)
    mask: bytes = field(repr=False)
    order: MaskOrder
    keep_unmasked: bool = True
    feather: int = 0
