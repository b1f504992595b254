"""The table of a day, for people."""

from __future__ import annotations

from load.bench.day_figures import IN_TIME, WANTED, Comparison
from load.bench.day_kinds import kinds, slowest
from load.bench.day_requests import RequestClass
from load.bench.day_techniques import LABELS


def rows(comparison: Comparison) -> list[tuple[str, str, str]]:
    """What people read: both sides, their ratios, who took how long, and what each technique was worth."""
    plain, suite = comparison.plain, comparison.suite
    both = [
        (f"answers within {IN_TIME:g} times the time alone", f"{plain.good_share:.1%}", f"{suite.good_share:.1%}"),
        *(
            (f"p{100 * share:g}", f"{plain.latency_s(share):.2f} s", f"{suite.latency_s(share):.2f} s")
            for share in (0.5, 0.95, 0.99)
        ),
        ("pictures a core-minute", f"{plain.per_core_minute:.1f}", f"{suite.per_core_minute:.1f}"),
    ]
    ratios = [
        (
            f"suite over plain, answers in time (goodput_ratio, wanted {WANTED['goodput_ratio']:g})",
            comparison.goodput_ratio,
        ),
        (f"plain over suite, p95 (p95_ratio, wanted {WANTED['p95_ratio']:g})", comparison.p95_ratio),
    ]
    by_kind = [
        row
        for kind in kinds(comparison)
        for row in (
            (f"{kind.requests} {kind.name}: p50, p95, in time", f"{kind.plain}", f"{kind.suite}"),
            ("    alone; of the suite's turns, their part", f"{kind.alone_s:.1f} s", f"{kind.turns_s:.1f} s"),
        )
    ]
    slow = [
        (
            f"slow: {RequestClass.of(row.request)}, {row.alone_s:.1f} s alone, came at {row.request.at_s:.0f} s",
            f"{row.plain_s:.1f} s",
            f"{row.suite_s:.1f} s" + (f" ({row.where})" if row.where else ""),
        )
        for row in slowest(comparison)
    ]
    without = []
    for name, figures in comparison.without.items():
        goodput, p95 = comparison.worth(name)
        said = f"{figures.good_share:.1%}, {figures.latency_s(0.95):.2f} s"
        without.append((f"without {LABELS[name]}: in time, p95; worth", "", f"{said}; {goodput:.2f}, {p95:.2f}"))
    return [*both, *((what, "", f"{ratio:.2f}") for what, ratio in ratios), *by_kind, *slow, *without]
