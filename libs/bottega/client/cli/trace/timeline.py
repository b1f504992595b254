"""A trace as a picture: a row for each lane, time from left to right, what waits in grey."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont

from bottega.client.cli.trace.lanes import Lane, lanes_of
from bottega.client.types.trace import JobTrace, TraceSpan

WIDTH = 1600
# Of what is drawn, which is then made smaller: Pillow draws no edge between two pixels.
_SCALE = 2
_MARGIN, _LANES_LEFT = 28, 300
_TITLE, _TEXT, _SMALL = 26, 18, 15
_TOP, _SERVICE, _LANE, _GAP = 86, 38, 26, 6
_INK, _FAINT, _PAPER, _RULE, _WAIT = "#1f2430", "#5d6675", "#ffffff", "#e6e9ee", "#c9ced6"
_COLOURS = ("#4a90d9", "#3a9d5d", "#e08a2e", "#8a63c9", "#c9506b", "#2aa1a8", "#a3822b")
_WAITS = "waits"
_LEAST_TICKS = 6
# A picture is for a request, not for a book: what is below is in the file for viewers.
_MOST_LANES = 80
# Whatever services and tracks are called.
_MOST_LETTERS = 32


def draw_timeline(trace: JobTrace) -> PIL.Image.Image:
    """A picture of WIDTH, as high as the trace's lanes."""
    return _Drawing(trace).draw()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    lane: Lane
    top: int
    colour: str
    named: bool


class _Drawing:
    def __init__(self, trace: JobTrace) -> None:
        self._trace = trace
        lanes = lanes_of(trace)
        self._more_lanes = max(0, len(lanes) - _MOST_LANES)
        self._end_s = max((span.end_s for span in trace.spans), default=0.0) or 1e-3
        self._services: list[tuple[str, int]] = []
        self._placed: list[_Placed] = []
        height = self._place(lanes[:_MOST_LANES])
        self._bottom = height
        self._image = PIL.Image.new("RGB", (WIDTH * _SCALE, (height + 60) * _SCALE), _PAPER)
        self._pen = PIL.ImageDraw.Draw(self._image)

    def draw(self) -> PIL.Image.Image:
        self._head()
        self._axis()
        for name, top in self._services:
            self._text((_MARGIN, top + 8), _cut(name), _TEXT)
            self._line((_MARGIN, top), (WIDTH - _MARGIN, top), _RULE)
        for placed in self._placed:
            if placed.named:
                self._text((_MARGIN + 16, placed.top + 4), _cut(placed.lane.track), _SMALL, _FAINT)
            for span in placed.lane.spans:
                self._span(placed, span)
        return self._image.resize((WIDTH, self._image.height // _SCALE), PIL.Image.Resampling.LANCZOS)

    def _place(self, lanes: Sequence[Lane]) -> int:
        """Gives lanes their places. Returns where the last one ends."""
        top, before, colours = _TOP, Lane(service="", track="", spans=()), dict[str, str]()
        for lane in lanes:
            if lane.service != before.service or not self._services:
                self._services.append((lane.service, top + _GAP))
                top += _SERVICE + _GAP
            named = (lane.service, lane.track) != (before.service, before.track)
            colour = _WAIT if lane.track == _WAITS else colours.setdefault(lane.track, self._colour(len(colours)))
            self._placed.append(_Placed(lane=lane, top=top, colour=colour, named=named))
            top, before = top + _LANE + _GAP, lane
        return top

    def _colour(self, number: int) -> str:
        return _COLOURS[number % len(_COLOURS)]

    def _head(self) -> None:
        services = len(self._services)
        self._text((_MARGIN, 20), f"Job {self._trace.job_id}", _TITLE)
        said = f"{self._end_s:.3f} s from its acceptance, in {services} service{'' if services == 1 else 's'}"
        left_out = self._trace.dropped and f"; {self._trace.dropped} spans were left out"
        more = self._more_lanes and f"; {self._more_lanes} more lanes are in the file for trace viewers"
        self._text((_MARGIN, 54), said + (left_out or "") + (more or ""), _SMALL, _FAINT)

    def _axis(self) -> None:
        every_s = next(each for each in _round_numbers() if self._end_s / each < _LEAST_TICKS * 2.5)
        for place in range(int(self._end_s / every_s) + 1):
            x = self._x(place * every_s)
            self._line((x, _TOP), (x, self._bottom + 6), _RULE)
            self._text((x, self._bottom + 12), _said_s(place * every_s), _SMALL, _FAINT, anchor="ma")

    def _span(self, placed: _Placed, span: TraceSpan) -> None:
        left, right = self._x(span.begin_s), self._x(span.end_s)
        box = (left, placed.top, max(right - 1, left + 1), placed.top + _LANE)
        self._pen.rectangle([round(each * _SCALE) for each in box], fill=placed.colour)
        room = right - left - 10
        _, named, number = span.name.rpartition("step ")
        for text in (f"{span.name}  {_said_s(span.seconds)}", span.name, *([number] if named else [])):
            if self._font(_SMALL).getlength(text) / _SCALE <= room:
                ink = _INK if placed.colour == _WAIT else _PAPER
                self._text((left + 5, placed.top + 4), text, _SMALL, ink)
                return

    def _x(self, seconds: float) -> float:
        return _LANES_LEFT + seconds / self._end_s * (WIDTH - _LANES_LEFT - _MARGIN)

    def _line(self, begin: tuple[float, float], end: tuple[float, float], colour: str) -> None:
        self._pen.line([each * _SCALE for each in (*begin, *end)], fill=colour, width=_SCALE)

    def _text(self, at: tuple[float, float], text: str, size: int, ink: str = _INK, *, anchor: str = "la") -> None:
        self._pen.text((at[0] * _SCALE, at[1] * _SCALE), text, fill=ink, font=self._font(size), anchor=anchor)

    def _font(self, size: int) -> PIL.ImageFont.FreeTypeFont | PIL.ImageFont.ImageFont:
        return PIL.ImageFont.load_default(size * _SCALE)


def _said_s(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 or not seconds else f"{seconds * 1e3:.3g} ms"


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else text[: _MOST_LETTERS - 1] + "…"


def _round_numbers() -> Iterator[float]:
    """1, 2, 5, 10, 20, 50 and so on, from a hundred microseconds."""
    for power in range(-4, 7):
        yield from (base * 10.0**power for base in (1, 2, 5))
