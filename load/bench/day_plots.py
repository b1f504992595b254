"""The plots of a day's page, as SVG."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, StrMethodFormatter

from load.bench.day_figures import IN_TIME, PLAIN, SUITE, Comparison, Figures

_COLOURS = {PLAIN: "#b4582c", SUITE: "#2c66ad"}
_GRID, _OFFERED = "#dfe3e9", "#c3c9d3"
_SIZE = (8.6, 3.6)
_HOURS = 24
# With the salt, the same figures always give the same bytes.
_STYLE: dict[Any, Any] = {"svg.hashsalt": "day", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
# Slower than so many times the time alone is all the same.
_SLOWEST = 100.0


def slowdowns(comparison: Comparison) -> bytes:
    """Share of the requests that were answered within so many times their time alone."""
    with rc_context(_STYLE):
        figure, axes = _axes()
        for name, side in _sides(comparison).items():
            count = len(side.slowdowns)
            shares = [100 * number / count for number in range(1, count + 1)]
            axes.step(
                [min(each, 2 * _SLOWEST) for each in side.slowdowns],
                shares,
                where="post",
                color=_COLOURS[name],
                label=name,
            )
        axes.axvline(IN_TIME, color="#1f2430", linewidth=0.8, linestyle="--")
        axes.annotate("in time", (IN_TIME, 3), xytext=(4, 0), textcoords="offset points")
        axes.set(xscale="log", xlim=(0.1, _SLOWEST), ylim=(0, 101))
        axes.set(xlabel="times what the request takes alone on the plain server", ylabel="% of the requests")
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        _legend_above(axes)
        return _svg(figure)


def hours(comparison: Comparison, length_s: float) -> bytes:
    """What came in each hour of the day, and how much of it was answered in time."""
    with rc_context(_STYLE):
        figure, axes = _axes()
        offered = _by_hour(comparison.suite, length_s, within=math.inf)
        axes.bar(range(_HOURS), offered, color=_OFFERED, width=0.9, label="came")
        for name, side in _sides(comparison).items():
            axes.step(
                [each - 0.5 for each in range(_HOURS + 1)],
                [*_by_hour(side, length_s, within=IN_TIME), 0],
                where="post",
                color=_COLOURS[name],
                label=f"{name}: in time",
            )
        axes.set(xlabel="hour of the day", ylabel="requests", xlim=(-0.5, _HOURS - 0.5))
        axes.set_xticks(range(0, _HOURS, 3))
        _legend_above(axes)
        return _svg(figure)


def latencies(comparison: Comparison, length_s: float) -> bytes:
    """Each request: when it came, and how long its answer took."""
    with rc_context(_STYLE):
        figure, axes = _axes()
        for name, side in _sides(comparison).items():
            axes.scatter(
                [_HOURS * answer.request.at_s / length_s for answer in side.answers],
                [side.scale.took_s(answer) for answer in side.answers],
                s=7,
                color=_COLOURS[name],
                label=name,
                linewidths=0,
            )
        axes.set(xlabel="hour of the day", ylabel="seconds to the answer", yscale="log", xlim=(0, _HOURS))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.minorticks_off()
        axes.set_xticks(range(0, _HOURS + 1, 3))
        _legend_above(axes)
        return _svg(figure)


def worths(comparison: Comparison, labels: Sequence[str]) -> bytes:
    """What each technique was worth: in answers in time, and in the p95. labels: of the techniques, in their order."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(_SIZE[0], 1.0 + 0.5 * len(labels)), layout="constrained")
        axes = figure.subplots()
        axes.grid(axis="x", color=_GRID)
        axes.set_axisbelow(True)
        worth = [comparison.worth(name) for name in comparison.without]
        places = range(len(labels))
        for shift, (what, colour) in enumerate((("answers in time", "#3a9d5d"), ("p95", "#e08a2e"))):
            axes.barh(
                [place + 0.36 * shift - 0.18 for place in places],
                [each[shift] for each in worth],
                height=0.34,
                color=colour,
                label=what,
            )
        axes.axvline(1.0, color="#1f2430", linewidth=0.8)
        axes.set_yticks(list(places), labels=list(labels))
        axes.invert_yaxis()
        axes.set(xlabel="times better with it than without it; 1 is no difference")
        _legend_above(axes)
        return _svg(figure)


def _sides(comparison: Comparison) -> dict[str, Figures]:
    return {PLAIN: comparison.plain, SUITE: comparison.suite}


def _by_hour(side: Figures, length_s: float, *, within: float) -> list[int]:
    """Requests of each hour, those answered within so many times their time alone; all days together."""
    counts = [0] * _HOURS
    for answer in side.answers:
        hour = min(int(_HOURS * answer.request.at_s / length_s), _HOURS - 1)
        counts[hour] += side.scale.slowdown(answer) <= within
    return counts


def _axes() -> tuple[Figure, Axes]:
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    axes.grid(color=_GRID)
    axes.set_axisbelow(True)
    return figure, axes


def _legend_above(axes: Axes) -> None:
    """In one line, where no line, bar or point can be."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)


def _svg(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()
