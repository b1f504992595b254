"""Images as they are before and after: their size and their pixels."""

from __future__ import annotations

from dataclasses import dataclass


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
