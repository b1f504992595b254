"""Draws a loading plan: what is loaded in one lane, what is computed meanwhile in another. It measures nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont

from bottega.addons.edits.planning.block_loading import BlockCost, StepPlan

WIDTH = 1720
# Of what is drawn, which is then made smaller: Pillow draws no edge between two pixels.
_SCALE = 2
_LEFT, _RIGHT, _TOP = 170, 40, 40
_TITLE, _TEXT, _SMALL = 34, 24, 21
_LANE, _LANE_GAP, _BAR, _BAR_GAP = 74, 62, 34, 18
_INK, _FAINT, _PAPER, _ARROW = "#1f2430", "#5d6675", "#ffffff", "#bcd3ec"
_MASKED, _FULL, _WAIT, _OTHER = "#3a9d5d", "#e08a2e", "#dfe3e9", "#c3c9d3"
# Of what is loaded, by step: the stream runs on from one to the next.
_LOADED = ("#4a90d9", "#2c66ad")
_LEAST_TICKS = 6
_LEGEND = {
    _LOADED[0]: "a block's recording is loaded",
    _MASKED: "its masked part is computed",
    _FULL: "a block is computed in full",
    _WAIT: "computing waits",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A way to do the same, and how long it takes."""

    label: str
    seconds: float
    chosen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSheet:
    """What the sheet says. subtitle: lines. steps, plans: of each step, its blocks and what is planned for them.

    bars: for comparison, of all of the steps.
    """

    title: str
    subtitle: Sequence[str]
    steps: Sequence[Sequence[BlockCost]]
    plans: Sequence[StepPlan]
    bars: Sequence[Bar]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """A block in both lanes.

    colour: of its computing. load: when it is loaded; None where it is not. wait_s: that computing waits for it.
    """

    colour: str
    load: tuple[float, float] | None
    compute: tuple[float, float]
    wait_s: float


def draw_plan(sheet: PlanSheet) -> PIL.Image.Image:
    """A picture of WIDTH, as high as it has to be."""
    return _Drawing(sheet).draw()


def _spans(sheet: PlanSheet) -> Iterator[Iterator[_Span]]:
    """As the plans have them: each lane does one thing at a time, in the order of the blocks."""
    loaded_s = computed_s = 0.0
    for blocks, plan in zip(sheet.steps, sheet.plans, strict=True):
        spans = []
        for block, taken, wait_s in zip(blocks, plan.takes, plan.waits_s, strict=True):
            begin_s = computed_s + wait_s
            computed_s = begin_s + (block.masked_s if taken else block.full_s)
            load = (loaded_s, loaded_s + block.load_s) if taken and block.load_s else None
            loaded_s = load[1] if load else loaded_s
            spans.append(
                _Span(colour=_MASKED if taken else _FULL, load=load, compute=(begin_s, computed_s), wait_s=wait_s)
            )
        yield iter(spans)


class _Drawing:
    def __init__(self, sheet: PlanSheet) -> None:
        self._sheet = sheet
        self._spans = [list(spans) for spans in _spans(sheet)]
        self._end_s = sheet.plans[-1].compute_s
        lanes = _TOP + 58 + 32 * len(sheet.subtitle) + 102
        self._load_top, self._compute_top = lanes, lanes + _LANE + _LANE_GAP
        self._bars_top = self._compute_top + _LANE + 140
        height = self._bars_top + len(sheet.bars) * (_BAR + _BAR_GAP) + 64
        self._image = PIL.Image.new("RGB", (WIDTH * _SCALE, height * _SCALE), _PAPER)
        self._pen = PIL.ImageDraw.Draw(self._image)

    def draw(self) -> PIL.Image.Image:
        self._head()
        self._legend()
        for spans in self._spans:
            self._arrows(spans)
        for number, spans in enumerate(self._spans):
            for span in spans:
                self._block(span, _LOADED[number % len(_LOADED)])
            self._name_loads(number + 1, spans)
        self._axis()
        self._steps()
        self._bars()
        size = (WIDTH, self._image.height // _SCALE)
        return self._image.resize(size, PIL.Image.Resampling.LANCZOS)

    def _head(self) -> None:
        self._text((_RIGHT, _TOP), self._sheet.title, _TITLE)
        for place, line in enumerate(self._sheet.subtitle):
            self._text((_RIGHT, _TOP + 54 + 32 * place), line, _SMALL, _FAINT)
        for top, label, about in (
            (self._load_top, "load", "from the store"),
            (self._compute_top, "compute", "on the device"),
        ):
            self._text((_RIGHT, top + 10), label, _TEXT)
            self._text((_RIGHT, top + 40), about, 17, _FAINT)

    def _legend(self) -> None:
        left, top = _LEFT, self._load_top - 78
        spans = [span for each in self._spans for span in each]
        seen_s = self._end_s / (WIDTH - _LEFT - _RIGHT)
        drawn = {span.colour for span in spans if span.compute[1] - span.compute[0] > seen_s}
        drawn |= {_LOADED[0], *([_WAIT] if any(span.wait_s > seen_s for span in spans) else [])}
        for colour, label in _LEGEND.items():
            if colour not in drawn:
                continue
            self._box(left, top + 4, left + 22, top + 26, colour)
            self._text((left + 30, top), label, _SMALL)
            left += 30 + round(self._font(_SMALL).getlength(label) / _SCALE) + 38

    def _arrows(self, spans: Sequence[_Span]) -> None:
        """From where a recording is there to where it is used."""
        for span in spans:
            if span.load:
                ends = (self._x(span.load[1]), self._load_top + _LANE, self._x(span.compute[0]), self._compute_top)
                self._pen.line([each * _SCALE for each in ends], fill=_ARROW, width=_SCALE)

    def _block(self, span: _Span, loaded: str) -> None:
        if span.load:
            self._lane(self._load_top, span.load, loaded)
        if span.wait_s > 0:
            self._lane(self._compute_top, (span.compute[0] - span.wait_s, span.compute[0]), _WAIT)
        self._lane(self._compute_top, span.compute, span.colour)

    def _name_loads(self, number: int, spans: Sequence[_Span]) -> None:
        loads = [span.load for span in spans if span.load]
        if loads:
            middle = (self._x(loads[0][0]) + self._x(loads[-1][1])) / 2
            self._text((middle, self._load_top - 8), f"for step {number}", _SMALL, _FAINT, anchor="ms")

    def _axis(self) -> None:
        """Milliseconds, at round numbers."""
        every = next(each for each in _round_numbers() if self._end_s * 1e3 / each < _LEAST_TICKS * 2.5)
        top = self._compute_top + _LANE
        for place in range(int(self._end_s * 1e3 / every) + 1):
            x = self._x(place * every / 1e3)
            self._pen.line([x * _SCALE, (top + 4) * _SCALE, x * _SCALE, (top + 14) * _SCALE], fill=_FAINT, width=_SCALE)
            self._text((x, top + 18), f"{place * every:g}{' ms' if not place else ''}", 18, _FAINT, anchor="ma")

    def _steps(self) -> None:
        """Where each step ends."""
        for number, spans in enumerate(self._spans, 1):
            end_s = spans[-1].compute[1]
            x, bottom = self._x(end_s), self._compute_top + _LANE
            for y in range(self._load_top - 8, bottom + 4, 10):
                self._pen.line([x * _SCALE, y * _SCALE, x * _SCALE, (y + 5) * _SCALE], fill=_INK, width=_SCALE)
            self._text((x, bottom + 46), f"step {number} is done after {end_s * 1e3:.0f} ms", _SMALL, anchor="ra")

    def _bars(self) -> None:
        steps = f"{len(self._spans)} steps" if len(self._spans) > 1 else "step"
        self._text((_RIGHT, self._bars_top - 44), f"The same {steps} in other ways:", _TEXT)
        longest_s = max(bar.seconds for bar in self._sheet.bars)
        for place, bar in enumerate(sorted(self._sheet.bars, key=lambda bar: bar.seconds)):
            top = self._bars_top + place * (_BAR + _BAR_GAP)
            right = _LEFT + bar.seconds / longest_s * (WIDTH - _LEFT - _RIGHT)
            self._box(_LEFT, top, right, top + _BAR, _MASKED if bar.chosen else _OTHER)
            label = f"{bar.label}: {bar.seconds * 1e3:.0f} ms"
            inside = right - _LEFT > self._font(_SMALL).getlength(label) / _SCALE + 24
            ink = (_PAPER if bar.chosen else _INK) if inside else _INK
            self._text((_LEFT + 12 if inside else right + 10, top + 4), label, _SMALL, ink)

    def _lane(self, top: float, when: tuple[float, float], colour: str) -> None:
        """A thin white edge parts neighbours, where there is room for it."""
        left, right = self._x(when[0]), self._x(when[1])
        edge = 1.0 if right - left > 4 else 0.4
        self._box(left, top, max(right - edge, left + 0.5), top + _LANE, colour)

    def _x(self, seconds: float) -> float:
        return _LEFT + seconds / self._end_s * (WIDTH - _LEFT - _RIGHT)

    def _box(self, left: float, top: float, right: float, bottom: float, colour: str) -> None:
        self._pen.rectangle([round(each * _SCALE) for each in (left, top, right, bottom)], fill=colour)

    def _text(self, at: tuple[float, float], text: str, size: int, ink: str = _INK, *, anchor: str = "la") -> None:
        self._pen.text((at[0] * _SCALE, at[1] * _SCALE), text, fill=ink, font=self._font(size), anchor=anchor)

    def _font(self, size: int) -> PIL.ImageFont.FreeTypeFont | PIL.ImageFont.ImageFont:
        return PIL.ImageFont.load_default(size * _SCALE)


def _round_numbers() -> Iterator[float]:
    """1, 2, 5, 10, 20, 50 and so on, from a tenth."""
    for power in range(-1, 7):
        yield from (base * 10.0**power for base in (1, 2, 5))
