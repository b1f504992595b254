"""Crops the image of an edit to the part that is drawn, and pastes the drawn pixels back.

The functions are pure, and run in a codec process. Pillow visits the pixels; no Python loop does.
Source: diffusers/image_processor.py (VaeImageProcessor.preprocess, _resize_and_crop, apply_overlay).
"""

from __future__ import annotations

import math
from dataclasses import replace

from PIL import Image, ImageChops, ImageOps

from bottega.codec import masks
from bottega.codec.images import load_image
from bottega.codec.limits import MAX_IMAGE_PIXELS
from bottega.codec.masks import Box
from bottega.codec.pixels import Crop, DecodedEdit, DecodedImage, ImageSize, MaskOrder, Overlay, Pixels

# Directions in which a mask's weight spreads. A step costs its length: no sum of steps is shorter than the straight
# line, so no weight spreads too far.
_DIRECTIONS = ((1, 0), (0, 1), (1, 1), (1, -1))


def decode(image: bytes, mask: bytes, order: MaskOrder) -> DecodedEdit:
    """Return the image and the mask of an edit at the size at which it is drawn. Raises BadImage like `masks.draw`."""
    whole = load_image(image)
    drawn = masks.draw(mask, replace(order, image_size=whole.facts.size))
    pixels = _pixels(_cut(whole.colours, order.width, order.height, drawn.crop))
    return DecodedEdit(pixels=pixels, mask=drawn.pixels, use=drawn.use, facts=whole.facts)


def decode_part(image: bytes, width: int, height: int, crop: Crop) -> DecodedImage:
    """Return a part of an image, resized: the part of a control image that belongs to a cropped edit.

    An image whose size is not `crop.image_size` is first resized to it. (Diffusers would crop it in another place.)
    Raises BadImage.
    """
    whole = load_image(image)
    box = (crop.x, crop.y, crop.x + crop.width, crop.y + crop.height)
    pixels = _pixels(_cut(masks.fitted(whole.colours, crop.image_size), width, height, box))
    return DecodedImage(pixels=pixels, facts=whole.facts)


def composed(drawn: Image.Image, overlay: Overlay) -> Image.Image:
    """Return the edited image: the drawn pixels, pasted into the overlay's image.

    If the edit was cropped, the result has the image's own size. With `keep_unmasked`, only the drawn pixels count
    inside the mask, and only the image's own farther outside than the feather; the result is then RGBA if some
    transparency is left, else RGB. Its `info` has the image's colour profile and nothing else. Raises BadImage.

    Args:
        drawn: The drawn pixels, of the order's size.
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
    mask = masks.read(overlay.mask, alpha=overlay.order.alpha).image
    order = overlay.order
    if order.padding is None:
        if not overlay.keep_unmasked:
            return drawn
        box = (0, 0, order.width, order.height)
        image = masks.fitted(image, ImageSize(width=order.width, height=order.height))
    mask = masks.fitted(mask, ImageSize(width=image.width, height=image.height)).convert("L")
    if order.padding is not None:
        found = masks.crop_region(mask, order.width, order.height, padding=order.padding)
        assert found is not None, "a mask that redraws nothing is refused before anything is drawn"
        box = found
        drawn = _covering(drawn, box[2] - box[0], box[3] - box[1])
    if not overlay.keep_unmasked:
        return _overlaid(drawn, image, mask, box)
    return _pasted(drawn, image, masks.binary(mask, 255), box, overlay.feather)


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

    Where the drawn part ends inside the image, the fade ends before it: a fade that is cut off would leave a seam.
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
    """Return what VaeImageProcessor.apply_overlay returns for a grey mask, with its rounding."""
    kept = Image.new("RGBa", image.size)
    kept.paste(image.convert("RGBA").convert("RGBa"), mask=ImageOps.invert(mask))
    kept = kept.convert("RGBA")
    base = Image.new("RGBA", image.size)
    base.paste(drawn, (box[0], box[1]))
    whole = base.convert("RGB").convert("RGBA")
    whole.alpha_composite(kept)
    return whole.convert("RGB")


def _covering(image: Image.Image, width: int, height: int) -> Image.Image:
    """Return the image resized to cover width x height, aspect ratio kept, and cropped. Source: _resize_and_crop."""
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
        return masks.fitted(image, ImageSize(width=width, height=height))
    return masks.filled(image.crop(crop), width, height)


def _shifted(image: Image.Image, x: int, y: int) -> Image.Image:
    """Return the image moved by x pixels to the right and y down; the rest is black."""
    return image.crop((-x, -y, image.width - x, image.height - y))


def _pixels(image: Image.Image) -> Pixels:
    return Pixels(width=image.width, height=image.height, data=image.tobytes())
