"""Figures drawn as bars: those of a group together, to one scale, with a mark at the bar that they have to meet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont

from load.gpu_report.report import Figure

WIDTH = 1400
_MARGIN, _LABEL, _VALUE = 40, 520, 220
_TITLE, _HEAD, _TEXT = 30, 22, 18
_BAR, _GAP, _HEAD_GAP = 24, 8, 44
_INK, _FAINT, _PAPER = "#1f2430", "#5d6675", "#ffffff"
_PLAIN, _MET, _MISSED, _MARK = "#4a90d9", "#3a9d5d", "#c8503c", "#1f2430"
# Of the longest bar, with its mark.
_ROOM = 1.15


def draw_bars(title: str, subtitle: str, figures: Sequence[Figure]) -> PIL.Image.Image:
    """Draw a picture of WIDTH, as high as it has to be, without the figures that have no group or no value."""
    shown = [figure for figure in figures if figure.group and not math.isnan(figure.value)]
    groups = {name: list(each) for name, each in groupby(shown, key=lambda figure: figure.group)}
    height = 150 + sum(_HEAD_GAP + len(each) * (_BAR + _GAP) for each in groups.values())
    image = PIL.Image.new("RGB", (WIDTH, height), _PAPER)
    pen = PIL.ImageDraw.Draw(image)
    pen.text((_MARGIN, 30), title, fill=_INK, font=_font(_TITLE))
    pen.text((_MARGIN, 74), subtitle, fill=_FAINT, font=_font(_TEXT))
    top = 110
    for name, each in groups.items():
        pen.text((_MARGIN, top + 10), name, fill=_INK, font=_font(_HEAD))
        top += _HEAD_GAP
        longest = max(max(figure.value, figure.bound or 0.0) for figure in each) * _ROOM
        for figure in each:
            _draw(pen, figure, top, longest)
            top += _BAR + _GAP
    return image


def _draw(pen: PIL.ImageDraw.ImageDraw, figure: Figure, top: int, longest: float) -> None:
    left, room = _MARGIN + _LABEL, WIDTH - 2 * _MARGIN - _LABEL - _VALUE
    scale = room / longest if longest > 0 else 0.0
    colour = _PLAIN if figure.bound is None else _MET if figure.met else _MISSED
    right = left + max(1, round(max(figure.value, 0.0) * scale))
    pen.rectangle((left, top, right, top + _BAR), fill=colour)
    if figure.bound is not None:
        at = left + round(figure.bound * scale)
        pen.rectangle((at - 1, top - 3, at + 1, top + _BAR + 3), fill=_MARK)
    pen.text((left - 12, top + 1), figure.label, fill=_INK, font=_font(_TEXT), anchor="ra")
    wanted = f"  ({figure.wanted.lower()})" if figure.wanted else ""
    pen.text((left + room + 10, top + 1), figure.shown + wanted, fill=_INK, font=_font(_TEXT))


def _font(size: int) -> PIL.ImageFont.FreeTypeFont | PIL.ImageFont.ImageFont:
    return PIL.ImageFont.load_default(size)
