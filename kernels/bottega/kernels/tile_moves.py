"""Cuts tiles out of feature maps, with zeros beyond the picture, and pastes them back.

One launch handles all tiles of one shape; torch clears all tiles and copies each one separately.

Shapes: maps [rows, channels, height, width] and tiles [tiles, channels, tile height, tile width], both of any strides;
corners int32 [tiles, 3]: row, top and left of each tile, where top and left may be beyond the picture. Values are moved
bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from bottega.kernels.kernel import Case, ceil_div, jit, power_of_two

_PLACES, _CHANNELS = 16, 128


@jit
def _move(
    maps: tl.tensor,
    tiles: tl.tensor,
    corners: tl.tensor,
    map_n: tl.tensor,
    map_c: tl.tensor,
    map_h: tl.tensor,
    map_w: tl.tensor,
    tile_n: tl.tensor,
    tile_c: tl.tensor,
    tile_h: tl.tensor,
    tile_w: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    places: tl.tensor,
    across: tl.tensor,
    channels: tl.tensor,
    paste: tl.constexpr,
    block_s: tl.constexpr,
    block_c: tl.constexpr,
) -> None:
    number = tl.program_id(0)
    row = tl.load(corners + number * 3).to(tl.int64)
    top = tl.load(corners + number * 3 + 1)
    left = tl.load(corners + number * 3 + 2)
    place = tl.program_id(1) * block_s + tl.arange(0, block_s)
    channel = tl.program_id(2) * block_c + tl.arange(0, block_c)
    y = place // across
    x = place % across
    held = (place < places)[:, None] & (channel < channels)[None, :]
    pictured = (top + y >= 0) & (top + y < height) & (left + x >= 0) & (left + x < width)
    seen = held & pictured[:, None]
    in_maps = (row * map_n + (top + y) * map_h + (left + x) * map_w)[:, None] + (channel * map_c)[None, :]
    in_tiles = (number.to(tl.int64) * tile_n + y * tile_h + x * tile_w)[:, None] + (channel * tile_c)[None, :]
    if paste:
        tl.store(maps + in_maps, tl.load(tiles + in_tiles, mask=seen, other=0.0), mask=seen)
    else:
        tl.store(tiles + in_tiles, tl.load(maps + in_maps, mask=seen, other=0.0), mask=held)


def cut_tiles(maps: Tensor, corners: Tensor, tiles: Tensor) -> None:
    """Fill the tiles from the maps."""
    _launch(maps, corners, tiles, paste=False)


def paste_tiles(maps: Tensor, corners: Tensor, tiles: Tensor) -> None:
    """Write the tiles to the maps, except beyond the picture. Tiles must not overlap."""
    _launch(maps, corners, tiles, paste=True)


def _launch(maps: Tensor, corners: Tensor, tiles: Tensor, *, paste: bool) -> None:
    count, channels, height, width = tiles.shape
    if not tiles.numel():
        return
    block_c = min(_CHANNELS, power_of_two(channels))
    _move[count, ceil_div(height * width, _PLACES), ceil_div(channels, block_c)](
        *(maps, tiles, corners, *maps.stride(), *tiles.stride(), *maps.shape[2:], height * width, width, channels),
        paste=paste,
        block_s=_PLACES,
        block_c=block_c,
    )


def corners_of(places: Sequence[tuple[int, int, int]], device: torch.device) -> Tensor:
    """Return the corners, int32 [tiles, 3] on the device, from row, top and left of each tile."""
    corners = torch.tensor(places, dtype=torch.int32)
    return (corners.pin_memory() if device.type == "cuda" else corners).to(device, non_blocking=True)


def cut_reference(maps: Tensor, places: Sequence[tuple[int, int, int]], shape: tuple[int, int]) -> Tensor:
    """Cut tiles with torch."""
    height, width = maps.shape[2:]
    tiles = maps.new_zeros(len(places), maps.shape[1], *shape)
    for tile, (row, top, left) in zip(tiles, places, strict=True):
        first, begin = max(top, 0), max(left, 0)
        last, end = max(first, min(top + shape[0], height)), max(begin, min(left + shape[1], width))
        tile[:, first - top : last - top, begin - left : end - left] = maps[row, :, first:last, begin:end]
    return tiles


def paste_reference(maps: Tensor, places: Sequence[tuple[int, int, int]], tiles: Tensor) -> None:
    """Paste tiles that are inside the picture with torch."""
    height, width = tiles.shape[2:]
    for tile, (row, top, left) in zip(tiles, places, strict=True):
        maps[row, :, top : top + height, left : left + width] = tile


# SDXL's maps at 1024 x 1024: channels, side, and side of a tile around a fifth of the picture.
_SDXL = ((320, 128, 60), (640, 64, 30), (1280, 32, 16))


def cases(device: torch.device, dtype: torch.dtype, *, small: bool = False) -> Sequence[Case]:
    """Return the cases of the bench; small ones for an interpreter."""
    made: list[Case] = []
    for channels, side, cut in ((20, 12, 5),) if small else _SDXL:
        made += _cases(device, dtype, channels, side, cut)
    return made


def _cases(device: torch.device, dtype: torch.dtype, channels: int, side: int, cut: int) -> Sequence[Case]:
    maps = torch.randn(2, channels, side, side, generator=torch.Generator("cpu").manual_seed(side)).to(device, dtype)
    maps = maps.contiguous(memory_format=torch.channels_last)
    places = [(row, side // 3, side // 4) for row in range(2)]
    corners = corners_of(places, device)
    tiles = cut_reference(maps, places, (cut, cut)).contiguous(memory_format=torch.channels_last)
    into = torch.empty_like(tiles)

    def cut_kernel() -> list[Tensor]:
        cut_tiles(maps, corners, into)
        return [into]

    def paste_kernel() -> list[Tensor]:
        paste_tiles(maps, corners, tiles)
        return [maps]

    def paste_plain() -> list[Tensor]:
        paste_reference(maps, places, tiles)
        return [maps]

    return [
        Case(
            name=f"cut_tiles {channels} x {cut} x {cut}",
            kernel=cut_kernel,
            reference=lambda: [cut_reference(maps, places, (cut, cut))],
            exact=lambda: [tiles],
            moved_bytes=2 * tiles.nbytes,
        ),
        Case(
            name=f"paste_tiles {channels} x {cut} x {cut}",
            kernel=paste_kernel,
            reference=paste_plain,
            exact=paste_plain,
            moved_bytes=2 * tiles.nbytes,
        ),
    ]
