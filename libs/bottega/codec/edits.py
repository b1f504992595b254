"""Edits as pixels: an image cut to what is drawn of it, and what was drawn put back into the image.

Pure functions, meant to run in a codec process. Every pixel is visited by Pillow, never by a loop of Python's.
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

# Directions in which a mask's weight spreads: with a step's length for its cost, no sum of steps is shorter than the
# straight line, so that nothing spreads farther than it may.
_DIRECTIONS = ((1, 0), (0, 1), (1, 1), (1, -1))


def decode(image: bytes, mask: bytes, order: MaskOrder) -> DecodedEdit:
    """Return the image and the mask of an edit, as they are drawn. Raises BadImage, as masks.draw does."""
    whole = load_image(image)
    drawn = masks.draw(mask, replace(order, image_size=whole.facts.size))
    pixels = _pixels(_cut(whole.colours, order.width, order.height, drawn.crop))
    return DecodedEdit(pixels=pixels, mask=drawn.pixels, use=drawn.use, facts=whole.facts)


def decode_part(image: bytes, width: int, height: int, crop: Crop) -> DecodedImage:
    """Return the part of an image, at this size: of a control image beside a crop. Raises BadImage.

    An image of another size than the one that the crop is of, which Diffusers would cut somewhere else, is first
    resized to that one's.
    """
    whole = load_image(image)
    box = (crop.x, crop.y, crop.x + crop.width, crop.y + crop.height)
    pixels = _pixels(_cut(masks.fitted(whole.colours, crop.image_size), width, height, box))
    return DecodedImage(pixels=pixels, facts=whole.facts)


def composed(drawn: Image.Image, overlay: Overlay) -> Image.Image:
    """Return what was drawn, at the order's size, in its image: of the image's own size where only a part was drawn.

    With keep_unmasked, the drawn pixels count in full in the mask, and not at all farther outside than the feather;
    then it is RGBA where the image has transparency and some of that is left, else RGB. Its `info` has the image's
    colour profile and nothing else. Raises BadImage.
    """
    image = load_image(overlay.image)
    whole = image.colours
    if image.alpha is not None and overlay.keep_unmasked:
        whole.putalpha(image.alpha)
    made = _composed(drawn, whole, overlay)
    if made.mode == "RGBA" and made.getchannel("A").getextrema() == (255, 255):
        made = made.convert("RGB")
    # Its numbers mean what the image's do.
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
        assert found is not None, "masks that redraw nothing are refused before anything is drawn"
        box = found
        drawn = _covering(drawn, box[2] - box[0], box[3] - box[1])
    if not overlay.keep_unmasked:
        return _overlaid(drawn, image, mask, box)
    return _pasted(drawn, image, masks.binary(mask, 255), box, overlay.feather)


def feathered(mask: Image.Image, feather: int) -> Image.Image:
    """Weights of 0 to 255 around a mask of 0 and 255: 255 in it, from there down to 0 in a straight line.

    Of a pixel d pixels outside it is 255 (1 - d / feather), and 0 from d = feather on. Distances are measured along
    rows, columns and diagonals: at most 9 % longer than the straight line, and never shorter.
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
    """Return the image, RGB or RGBA, with what was drawn, opaque, where its mask is. mask: 0 or 255.

    Where the drawn part ends within the image, the fade does so before: cut off, it would be a seam.
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
    # Colours count by their opacity: those under transparent pixels, often black, would be a rim around what is drawn.
    # They are never premultiplied in 8 bits, where a colour that is off by 1 comes back off by 255 over its opacity.
    part.putalpha(weights)
    image.paste(Image.alpha_composite(image.crop(around), part), around, weights.point([0] + [255] * 255))
    return image


def _overlaid(drawn: Image.Image, image: Image.Image, mask: Image.Image, box: Box) -> Image.Image:
    """As apply_overlay, in its arithmetic. mask: grey."""
    kept = Image.new("RGBa", image.size)
    kept.paste(image.convert("RGBA").convert("RGBa"), mask=ImageOps.invert(mask))
    kept = kept.convert("RGBA")
    base = Image.new("RGBA", image.size)
    base.paste(drawn, (box[0], box[1]))
    whole = base.convert("RGB").convert("RGBA")
    whole.alpha_composite(kept)
    return whole.convert("RGB")


def _covering(image: Image.Image, width: int, height: int) -> Image.Image:
    """The image resized to cover width x height with its aspect ratio kept, and cut. Source: _resize_and_crop."""
    # The comparisons of Diffusers, in its arithmetic: another rounding is another picture.
    ratio, own_ratio = width / height, image.width / image.height
    covering_width = width if ratio > own_ratio else image.width * height // image.height
    covering_height = height if ratio <= own_ratio else image.height * width // image.width
    left, top = covering_width // 2 - width // 2, covering_height // 2 - height // 2
    if covering_width * covering_height <= MAX_IMAGE_PIXELS:
        resized = image.resize((covering_width, covering_height), Image.Resampling.LANCZOS)
        return resized.crop((left, top, left + width, top + height))
    # Of a crop far wider or higher than what was drawn, it would be many times the image, of which no more than this is
    # seen. Some values round another way.
    x, y = image.width / covering_width, image.height / covering_height
    seen = (left * x, top * y, (left + width) * x, (top + height) * y)
    return image.resize((width, height), Image.Resampling.LANCZOS, box=seen)


def _cut(image: Image.Image, width: int, height: int, crop: Box | None) -> Image.Image:
    """As VaeImageProcessor.preprocess."""
    if crop is None:
        return masks.fitted(image, ImageSize(width=width, height=height))
    return masks.filled(image.crop(crop), width, height)


def _shifted(image: Image.Image, x: int, y: int) -> Image.Image:
    """The image, so many pixels to the right and down; black comes in."""
    return image.crop((-x, -y, image.width - x, image.height - y))


def _pixels(image: Image.Image) -> Pixels:
    return Pixels(width=image.width, height=image.height, data=image.tobytes())
