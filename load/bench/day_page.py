"""The report page of a day: one HTML file with its plots inside, that needs nothing else."""

from __future__ import annotations

import argparse
import base64
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, StrMethodFormatter

from load.bench.day_figures import IN_TIME, PLAIN, SUITE, WANTED, Comparison, Figures, kinds, slowest
from load.bench.day_requests import RequestClass
from load.bench.day_sides import LABELS
from load.bench.framework import machine

_TEMPLATE = Path(__file__).with_name("day_page.html.jinja")
_COLOURS = {PLAIN: "#b4582c", SUITE: "#2c66ad"}
_GRID, _OFFERED = "#dfe3e9", "#c3c9d3"
_SIZE = (8.6, 3.6)
_HOURS = 24
# With the salt, the same figures always give the same bytes.
_STYLE: dict[Any, Any] = {"svg.hashsalt": "day", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
# Greater slowdowns are drawn as this one.
_SLOWEST = 100.0


def page(comparison: Comparison, options: argparse.Namespace, rate_per_s: float) -> str:
    """Return the page."""
    length_s = 60.0 * options.minutes
    plots = {
        "slowdowns": _slowdowns(comparison),
        "hours": _hours(comparison, length_s),
        "latencies": _latencies(comparison, length_s),
    }
    if comparison.without:
        plots["worths"] = _worths(comparison, [LABELS[name] for name in comparison.without])
    template = jinja2.Template(
        _TEMPLATE.read_text(encoding="utf-8"), autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    html: str = template.render(
        machine=machine(),
        options=options,
        deadline_s=comparison.suite.scale.deadline_s,
        rate_per_s=rate_per_s,
        in_time=IN_TIME,
        ratios=[
            _ratio("goodput_ratio", "answers in time, suite over plain", comparison.goodput_ratio),
            _ratio("p95_ratio", "p95, plain over suite", comparison.p95_ratio),
        ],
        sides=[_side(PLAIN, comparison.plain), _side(SUITE, comparison.suite)],
        worths=[_worth(comparison, name) for name in comparison.without],
        kinds=kinds(comparison),
        slowest=[(str(RequestClass.of(row.request)), row) for row in slowest(comparison)],
        void=comparison.void,
        plots={name: base64.b64encode(svg).decode() for name, svg in plots.items()},
    )
    return html


def _ratio(name: str, what: str, value: float) -> dict[str, object]:
    return {
        "name": name,
        "what": what,
        "value": f"{value:.2f}",
        "wanted": WANTED[name],
        "reached": value >= WANTED[name],
    }


def _side(name: str, figures: Figures) -> dict[str, object]:
    """Return a side's line of the first table; its notes are what its techniques did, and what was not answered."""
    p50, p95, p99 = (f"{figures.latency_s(share):.2f} s" for share in (0.5, 0.95, 0.99))
    return {
        "name": name,
        "requests": len(figures.answers),
        "in_time": f"{figures.good_share:.1%}",
        "answered": f"{figures.answered / len(figures.answers):.1%}",
        "p50": p50,
        "p95": p95,
        "p99": p99,
        "per_core_minute": f"{figures.per_core_minute:.1f}",
        "notes": "; ".join([*figures.uses, *figures.reasons]),
    }


def _worth(comparison: Comparison, name: str) -> dict[str, object]:
    goodput, p95 = comparison.worth(name)
    side = _side(name, comparison.without[name])
    return {"label": LABELS[name], "side": side, "goodput": f"{goodput:.2f}", "p95": f"{p95:.2f}"}


def _slowdowns(comparison: Comparison) -> bytes:
    """Draw the share of the requests that were answered within so many times their time alone."""
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


def _hours(comparison: Comparison, length_s: float) -> bytes:
    """Draw what came in each hour of the day, and how much of it was answered in time."""
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


def _latencies(comparison: Comparison, length_s: float) -> bytes:
    """Draw when each request came, and how long its answer took."""
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


def _worths(comparison: Comparison, labels: Sequence[str]) -> bytes:
    """Draw what each technique was worth: in answers in time, and in the p95."""
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
    """Return the requests of each hour of all days that were answered within so many times their time alone."""
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
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)


def _svg(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()
