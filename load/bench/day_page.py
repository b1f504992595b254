"""The report page of a day: one HTML file with its plots inside, that needs nothing else."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

import jinja2

from load.bench import day_plots
from load.bench.day_figures import IN_TIME, PLAIN, SUITE, WANTED, Comparison, Figures
from load.bench.day_kinds import kinds, slowest
from load.bench.day_options import DayOptions
from load.bench.day_requests import RequestClass
from load.bench.day_techniques import LABELS
from load.bench.report import machine

_TEMPLATE = Path(__file__).with_name("day_page.html.jinja")


@dataclass(frozen=True, slots=True, kw_only=True)
class SideRow:
    """A side's line of the first table, as people read it. notes: what its techniques did, what was not answered."""

    name: str
    requests: int
    in_time: str
    answered: str
    p50: str
    p95: str
    p99: str
    per_core_minute: str
    notes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorthRow:
    """A technique's line of the second one."""

    label: str
    side: SideRow
    goodput: str
    p95: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One of the two that count."""

    name: str
    what: str
    value: str
    wanted: float
    reached: bool


def page(comparison: Comparison, options: DayOptions, rate_per_s: float) -> str:
    """All of it."""
    plots = {
        "slowdowns": day_plots.slowdowns(comparison),
        "hours": day_plots.hours(comparison, options.length_s),
        "latencies": day_plots.latencies(comparison, options.length_s),
    }
    labels = [LABELS[name] for name in comparison.without]
    if labels:
        plots["worths"] = day_plots.worths(comparison, labels)
    template = jinja2.Template(
        _TEMPLATE.read_text(encoding="utf-8"), autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    html: str = template.render(
        machine=machine(),
        options=options,
        deadline_s=comparison.suite.scale.deadline_s,
        rate_per_s=rate_per_s,
        in_time=IN_TIME,
        ratios=_ratios(comparison),
        sides=[_side(PLAIN, comparison.plain), _side(SUITE, comparison.suite)],
        worths=[_worth(comparison, name) for name in comparison.without],
        kinds=kinds(comparison),
        slowest=[(str(RequestClass.of(row.request)), row) for row in slowest(comparison)],
        void=comparison.void,
        plots={name: base64.b64encode(svg).decode() for name, svg in plots.items()},
    )
    return html


def _ratios(comparison: Comparison) -> list[Ratio]:
    said = {
        "goodput_ratio": ("answers in time, suite over plain", comparison.goodput_ratio),
        "p95_ratio": ("p95, plain over suite", comparison.p95_ratio),
    }
    return [
        Ratio(name=name, what=what, value=f"{value:.2f}", wanted=WANTED[name], reached=value >= WANTED[name])
        for name, (what, value) in said.items()
    ]


def _side(name: str, figures: Figures) -> SideRow:
    p50, p95, p99 = (f"{figures.latency_s(share):.2f} s" for share in (0.5, 0.95, 0.99))
    return SideRow(
        name=name,
        requests=len(figures.answers),
        in_time=f"{figures.good_share:.1%}",
        answered=f"{figures.answered / len(figures.answers):.1%}",
        p50=p50,
        p95=p95,
        p99=p99,
        per_core_minute=f"{figures.per_core_minute:.1f}",
        notes="; ".join([*figures.uses, *figures.reasons]),
    )


def _worth(comparison: Comparison, name: str) -> WorthRow:
    goodput, p95 = comparison.worth(name)
    return WorthRow(
        label=LABELS[name],
        side=_side(name, comparison.without[name]),
        goodput=f"{goodput:.2f}",
        p95=f"{p95:.2f}",
    )
