"""Reads masks of edits, crops the image to the part that is drawn, and pastes the drawn pixels back.

The functions are pure, and run in a codec process. Only Pillow iterates over pixels. As in Diffusers' inpainting
pipelines, a mask is cropped to the part of the image that is drawn, resized, made grey and then binarized. There are
two differences: a mask whose size is not the image's is first resized to it (Diffusers cannot crop it), and a mask that
redraws nothing is refused. Sources: diffusers/image_processor.py (VaeImageProcessor.preprocess, _resize_and_crop,
apply_overlay), pipeline_stable_diffusion_xl_inpaint.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from PIL import Image, ImageChops, ImageFilter, ImageOps

from bottega.codec.images import load, load_image, too_much_memory
from bottega.codec.pixels import Crop, DecodedEdit, DecodedImage, ImageSize, MaskOrder, Overlay, Pixels
from bottega.codec.structure import MAX_IMAGE_PIXELS
from bottega.errors import BadImage
from bottega.v1.generation_pb2 import MaskUse

# Binarization: .5 and above is white, and 127/255 is below.
_WHITE = 128
_ONE_CHANNEL = frozenset({"1", "L"})

Box = tuple[int, int, int, int]
"""Left, upper, right and lower edge in pixels; right and lower are exclusive."""
# Directions in which a mask's weight spreads. A step costs its length: no sum of steps is shorter than the straight
# line, so no weight spreads too far.
_DIRECTIONS = ((1, 0), (0, 1), (1, 1), (1, -1))


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnMask:
    """A mask at the size at which the image is drawn."""

    use: MaskUse
    """Properties of the mask, without its digest."""
    pixels: bytes
    """uint8 [height, width], row-major: 1 where the image is redrawn, else 0."""
    crop: Box | None
    """The part of the image that is drawn, in pixels of the image; None for the whole image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadMask:
    """A mask in its own size."""

    image: Image.Image
    """The mask: white where the image is redrawn."""
    converted: bool = False
    """Whether the mask has several channels, which become one."""
    transparency_unread: bool = False
    """Whether some pixels are transparent, but the edit does not use transparency."""


def draw(data: bytes, order: MaskOrder) -> DrawnMask:
    """Return a mask at the size at which the image is drawn.

    Raises BadImage, also if the mask selects no pixel or no element of the latent.
    """
    try:
        found = read(data, alpha=order.alpha)
        mask = found.image
        own = ImageSize(width=mask.width, height=mask.height)
        crop = None
        if order.padding is not None:
            assert order.image_size is not None, "a crop needs the image's size"
            mask = fitted(mask, order.image_size)
            crop = crop_region(mask.convert("L"), order.width, order.height, padding=order.padding)
            if crop is None:
                raise _empty(order, found)
            mask = filled(mask.crop(crop), order.width, order.height)
        mask = fitted(mask, ImageSize(width=order.width, height=order.height)).convert("L")
        pixels = binary(mask, 1).tobytes()
    except MemoryError:
        raise too_much_memory() from None
    if 1 not in pixels:
        raise _empty(order, found)
    _check_latent(pixels, order)
    use = _use(own, pixels, order, crop)
    use.converted, use.transparency_unread = found.converted, found.transparency_unread
    return DrawnMask(use=use, pixels=pixels, crop=crop)


def inspect(data: bytes, order: MaskOrder) -> MaskUse:
    """Return which part of the image a mask redraws, without the mask's digest. Raise BadImage as `draw` does."""
    return draw(data, order).use


def read(data: bytes, *, alpha: bool) -> ReadMask:
    """Decode a mask: grey if it is read from transparency, else RGB. Raise BadImage if that is impossible."""
    image, mode = load(data, "RGBA" if alpha else None)
    if alpha:
        return ReadMask(image=ImageOps.invert(image.getchannel("A")))
    unread = image.mode == "RGBA" and _is_transparent(image)
    return ReadMask(image=image.convert("RGB"), converted=mode not in _ONE_CHANNEL, transparency_unread=unread)


def binary(mask: Image.Image, white: int) -> Image.Image:
    """Return a grey mask with values 0 and `white`."""
    return mask.point([0] * _WHITE + [white] * (256 - _WHITE))


def fitted(image: Image.Image, size: ImageSize) -> Image.Image:
    """Return the image resized as by VaeImageProcessor.resize, which does not keep the aspect ratio."""
    wanted = (size.width, size.height)
    return image if image.size == wanted else image.resize(wanted, Image.Resampling.LANCZOS)


def crop_region(mask: Image.Image, width: int, height: int, *, padding: int) -> Box | None:
    """Return the part of an image to draw: around the redrawn pixels, with the aspect ratio of width x height.

    The part is inside the image as far as possible. Diffusers instead uses the part around all pixels that are not
    black, which is too large for a mask with a background of 1 or with the ringing of a resize.

    Args:
        mask: Grey mask of the image's size.
        padding: Pixels around the redrawn pixels that are drawn, too.

    Returns:
        The part, or None if nothing is redrawn.

    Source: VaeImageProcessor.get_crop_region.
    """
    found = binary(mask, 255).getbbox()
    if found is None:
        return None
    x1, y1 = max(found[0] - padding, 0), max(found[1] - padding, 0)
    x2, y2 = min(found[2] + padding, mask.width), min(found[3] + padding, mask.height)
    ratio = width / height
    if (x2 - x1) / (y2 - y1) > ratio:
        y1, y2 = _widened(y1, y2, int((x2 - x1) / ratio - (y2 - y1)), mask.height)
    else:
        x1, x2 = _widened(x1, x2, int((y2 - y1) * ratio - (x2 - x1)), mask.width)
    return x1, y1, x2, y2


def filled(image: Image.Image, width: int, height: int) -> Image.Image:
    """Return the image fitted into width x height without distortion, and filled up with the colours of its edges.

    Raises BadImage if the image is so narrow that nothing would be left of it.
    Source: VaeImageProcessor._resize_and_fill.
    """
    # Comparisons and arithmetic as in Diffusers: another rounding would give another picture.
    ratio, own_ratio = width / height, image.width / image.height
    fitted_width = width if ratio < own_ratio else image.width * height // image.height
    fitted_height = height if ratio >= own_ratio else image.height * width // image.width
    if not (fitted_width and fitted_height):
        raise BadImage(f"the part to be drawn is {image.width}x{image.height} pixels: too narrow for {width}x{height}")
    inner = image.resize((fitted_width, fitted_height), Image.Resampling.LANCZOS)
    whole = Image.new("RGB", (width, height))
    left, top = width // 2 - fitted_width // 2, height // 2 - fitted_height // 2
    whole.paste(inner, box=(left, top))
    if ratio < own_ratio and top > 0:
        whole.paste(inner.resize((width, top), box=(0, 0, width, 0)), box=(0, 0))
        lowest = inner.resize((width, top), box=(0, inner.height, width, inner.height))
        whole.paste(lowest, box=(0, top + fitted_height))
    elif ratio > own_ratio and left > 0:
        whole.paste(inner.resize((left, height), box=(0, 0, 0, height)), box=(0, 0))
        rightmost = inner.resize((left, height), box=(inner.width, 0, inner.width, height))
        whole.paste(rightmost, box=(left + fitted_width, 0))
    return whole


def computed_share(pixels: bytes, order: MaskOrder) -> float:
    """Return the share of tokens, in (0, 1], that an edit computes if it reuses activations, including the margin.

    Tokens are those of the finest attention level. As in the engine, an element of the latent is redrawn if its first
    pixel is, and a token if any of its elements is.

    Args:
        pixels: See DrawnMask.
    """
    scale, width = order.latent_scale, order.width
    lines = [pixels[row : row + width : scale] for row in range(0, width * order.height, width * scale)]
    tokens = _any(Image.frombytes("L", (len(lines[0]), len(lines)), b"".join(lines)))
    for _ in range(order.token.bit_length() - 1):  # levels halve a side, and round up
        tokens = _any(tokens.reduce(2))
    if order.margin:
        tokens = tokens.filter(ImageFilter.MaxFilter(2 * order.margin + 1))
    return tokens.histogram()[255] / (tokens.width * tokens.height)


def _any(tokens: Image.Image) -> Image.Image:
    """Return the image with all pixels white that are not black."""
    return tokens.point([0] + [255] * 255)


def _widened(low: int, high: int, by: int, end: int) -> tuple[int, int]:
    """Return the span from `low` to `high` made `by` pixels wider, inside [0, end] if possible."""
    low, high = low - by // 2, high + by - by // 2
    if high >= end:
        low, high = low - (high - end), end
    if low < 0:
        low, high = 0, high - low
    return low, min(high, end)


def _is_transparent(image: Image.Image) -> bool:
    """Return whether any pixel is less than half opaque."""
    return any(image.getchannel("A").histogram()[:_WHITE])


def _check_latent(pixels: bytes, order: MaskOrder) -> None:
    """Raise BadImage if no element of the latent is redrawn. As in torch, the first pixel of an element decides."""
    scale, width = order.latent_scale, order.width
    rows = range(0, len(pixels), width * scale)
    if not any(1 in pixels[row : row + width : scale] for row in rows):
        rule = f"nothing is left of it in the latent, of which an element is {scale}x{scale} pixels: make it larger"
        raise BadImage(f"redraws nothing: {rule}")


def _empty(order: MaskOrder, found: ReadMask) -> BadImage:
    what = "transparent (less than half opaque)" if order.alpha else "white (.5 and above)"
    hint = "; mask_alpha redraws what is transparent in it" if found.transparency_unread else ""
    return BadImage(f"redraws nothing: no part of it is {what} at {order.width}x{order.height}{hint}")


def _use(own: ImageSize, pixels: bytes, order: MaskOrder, crop: Box | None) -> MaskUse:
    shown = order.image_size if crop is not None else ImageSize(width=order.width, height=order.height)
    use = MaskUse(
        width=own.width,
        height=own.height,
        resized=own != shown,
        share=pixels.count(1) / len(pixels),
    )
    if order.token:
        use.computed_share = computed_share(pixels, order)
    if crop is not None:
        use.crop_x, use.crop_y = crop[0], crop[1]
        use.crop_width, use.crop_height = crop[2] - crop[0], crop[3] - crop[1]
    return use


def decode(image: bytes, mask: bytes, order: MaskOrder) -> DecodedEdit:
    """Return the image and the mask of an edit at the size at which it is drawn. Raise BadImage as `draw` does."""
    whole = load_image(image)
    drawn = draw(mask, replace(order, image_size=whole.facts.size))
    pixels = _pixels(_cut(whole.colours, order.width, order.height, drawn.crop))
    return DecodedEdit(pixels=pixels, mask=drawn.pixels, use=drawn.use, facts=whole.facts)


def decode_part(image: bytes, width: int, height: int, crop: Crop) -> DecodedImage:
    """Return a part of an image, resized: for example, the part of a control image that belongs to a cropped edit.

    An image whose size is not `crop.image_size` is first resized to it. (Diffusers would crop another part.) Raises
    BadImage.
    """
    whole = load_image(image)
    box = (crop.x, crop.y, crop.x + crop.width, crop.y + crop.height)
    pixels = _pixels(_cut(fitted(whole.colours, crop.image_size), width, height, box))
    return DecodedImage(pixels=pixels, facts=whole.facts)


def composed(drawn: Image.Image, overlay: Overlay) -> Image.Image:
    """Return the edited image: the drawn pixels, pasted into the overlay's image.

    If the edit was cropped, the result has the image's own size. With `keep_unmasked`, only the drawn pixels count
    inside the mask, and only the image's own pixels outside of mask and feather. The result is RGBA if some
    transparency is left, else RGB. Its `info` has the image's colour profile and nothing else. Raises BadImage.

    Args:
        drawn: The drawn pixels, in the size of the overlay's order.
    """
    image = load_image(overlay.image)
    whole = image.colours
    if image.alpha is not None and overlay.keep_unmasked:
        whole.putalpha(image.alpha)
    made = _composed(drawn, whole, overlay)
    if made.mode == "RGBA" and made.getchannel("A").getextrema() == (255, 255):
        made = made.convert("RGB")
    # The colours are those of the image's colour space.
    made.info = {"icc_profile": image.facts.icc_profile} if image.facts.icc_profile else {}
    return made


def _composed(drawn: Image.Image, image: Image.Image, overlay: Overlay) -> Image.Image:
    mask = read(overlay.mask, alpha=overlay.order.alpha).image
    order = overlay.order
    if order.padding is None:
        if not overlay.keep_unmasked:
            return drawn
        box = (0, 0, order.width, order.height)
        image = fitted(image, ImageSize(width=order.width, height=order.height))
    mask = fitted(mask, ImageSize(width=image.width, height=image.height)).convert("L")
    if order.padding is not None:
        found = crop_region(mask, order.width, order.height, padding=order.padding)
        assert found is not None, "a mask that redraws nothing is refused before anything is drawn"
        box = found
        drawn = _covering(drawn, box[2] - box[0], box[3] - box[1])
    if not overlay.keep_unmasked:
        return _overlaid(drawn, image, mask, box)
    return _pasted(drawn, image, binary(mask, 255), box, overlay.feather)


def feathered(mask: Image.Image, feather: int) -> Image.Image:
    """Return weights from 0 to 255: 255 inside a mask of 0 and 255, falling linearly to 0 outside it.

    The weight of a pixel at distance d is 255 (1 - d / feather), and 0 from d = feather on. Distances are measured
    along rows, columns and diagonals: at most 9 % longer than the straight line, and never shorter.
    """
    weights = mask
    for x, y in _DIRECTIONS:
        length, step = math.hypot(x, y), 1
        while step * length < feather:  # steps of 1, 2, 4, ... reach every distance
            cost = math.ceil(255 * step * length / feather)
            lowered = weights.point([max(0, weight - cost) for weight in range(256)])
            for sign in (-1, 1):
                weights = ImageChops.lighter(weights, _shifted(lowered, sign * step * x, sign * step * y))
            step *= 2
    return weights


def _pasted(drawn: Image.Image, image: Image.Image, mask: Image.Image, box: Box, feather: int) -> Image.Image:
    """Return the image, RGB or RGBA, with the drawn pixels pasted where the mask is 255.

    If the drawn part ends inside the image, the fade ends before it: a fade that is cut off would leave a seam.
    """
    found = mask.getbbox()
    if found is None:
        return image
    sizes = (image.width, image.height)
    before = [found[side] - box[side] for side in (0, 1) if box[side] > 0]
    behind = [box[2 + side] - found[2 + side] for side in (0, 1) if box[2 + side] < sizes[side]]
    feather = min([feather, *before, *behind])
    left, top = max(found[0] - feather, box[0]), max(found[1] - feather, box[1])
    right, bottom = min(found[2] + feather, box[2]), min(found[3] + feather, box[3])
    around = (left, top, right, bottom)
    weights = feathered(mask.crop(around), feather)
    part = drawn.crop((left - box[0], top - box[1], right - box[0], bottom - box[1]))
    if image.mode == "RGB":
        image.paste(part, around, weights)
        return image
    # Weigh colours by their opacity: those of transparent pixels, often black, would leave a rim around the drawn part.
    # Do not premultiply them in 8 bits: dividing again multiplies a rounding error of 1 by 255 over the opacity.
    part.putalpha(weights)
    image.paste(Image.alpha_composite(image.crop(around), part), around, weights.point([0] + [255] * 255))
    return image


def _overlaid(drawn: Image.Image, image: Image.Image, mask: Image.Image, box: Box) -> Image.Image:
    """Compute the same as VaeImageProcessor.apply_overlay for a grey mask, with the same rounding."""
    kept = Image.new("RGBa", image.size)
    kept.paste(image.convert("RGBA").convert("RGBa"), mask=ImageOps.invert(mask))
    kept = kept.convert("RGBA")
    base = Image.new("RGBA", image.size)
    base.paste(drawn, (box[0], box[1]))
    whole = base.convert("RGB").convert("RGBA")
    whole.alpha_composite(kept)
    return whole.convert("RGB")


def _covering(image: Image.Image, width: int, height: int) -> Image.Image:
    """Return the image resized without distortion to cover width x height, and cropped. Source: _resize_and_crop."""
    # Comparisons and arithmetic as in Diffusers: another rounding would give another picture.
    ratio, own_ratio = width / height, image.width / image.height
    covering_width = width if ratio > own_ratio else image.width * height // image.height
    covering_height = height if ratio <= own_ratio else image.height * width // image.width
    left, top = covering_width // 2 - width // 2, covering_height // 2 - height // 2
    if covering_width * covering_height <= MAX_IMAGE_PIXELS:
        resized = image.resize((covering_width, covering_height), Image.Resampling.LANCZOS)
        return resized.crop((left, top, left + width, top + height))
    # For a crop far wider or higher than the drawn part, the resized image would be huge. Resize only the visible part;
    # some values are then rounded differently.
    x, y = image.width / covering_width, image.height / covering_height
    seen = (left * x, top * y, (left + width) * x, (top + height) * y)
    return image.resize((width, height), Image.Resampling.LANCZOS, box=seen)


def _cut(image: Image.Image, width: int, height: int, crop: Box | None) -> Image.Image:
    """Return the image, or a crop of it, resized as by VaeImageProcessor.preprocess."""
    if crop is None:
        return fitted(image, ImageSize(width=width, height=height))
    return filled(image.crop(crop), width, height)


def _shifted(image: Image.Image, x: int, y: int) -> Image.Image:
    """Return the image moved by x pixels to the right and y down; the uncovered area is black."""
    return image.crop((-x, -y, image.width - x, image.height - y))


def _pixels(image: Image.Image) -> Pixels:
    return Pixels(width=image.width, height=image.height, data=image.tobytes())
