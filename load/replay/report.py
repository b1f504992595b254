"""The report of a run: lines while it goes on, a table for people, then one line of JSON for programs."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from load.replay.requests import PlannedRequest
from load.replay.results import Answer, Outcome, Replay, Result, concluded, percentile_s

PERCENTILES = (50.0, 95.0, 99.0, 100.0)
_HEADS = ("", "requests", *Outcome, "p50", "p95", "p99", "most")

Run = Replay[PlannedRequest]


def by_kind(run: Run, *, deadline_s: float, length_s: float) -> dict[str, Run]:
    """Return the whole run, then draws and edits alone, as far as it has some."""

    def part(kind: str) -> Sequence[Answer[PlannedRequest]]:
        return [answer for answer in run.answers if answer.request.kind == kind]

    parts = {f"{kind}s": part(kind) for kind in ("draw", "edit")}
    return {"all": run} | {
        name: concluded(answers, deadline_s=deadline_s, length_s=length_s) for name, answers in parts.items() if answers
    }


def table(runs: dict[str, Run]) -> str:
    """Return a row for each, and a line for each reason why requests were not answered."""
    rows = [_HEADS, *(_row(name, run) for name, run in runs.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    lines = [_line(row, widths) for row in rows]
    whole = runs["all"]
    for (outcome, reason), count in sorted(whole.reasons.items()):
        lines.append(f"  {count} {outcome}: {reason}")
    lines.append(
        f"offered {whole.offered_rate:.2f} requests a second, of which {whole.achieved_rate:.2f} went out on time"
    )
    lines.append("seconds from when a request was meant to go out; of late ones the deadline counts")
    return "\n".join(lines)


def values(runs: dict[str, Run]) -> dict[str, object]:
    """Return the fields of the line of JSON: counts, seconds, and why the run is void, or null."""
    whole = runs["all"]
    fields: dict[str, object] = {
        "requests": len(whole.answers),
        **{outcome.value: whole.outcomes[outcome] for outcome in Outcome},
        "offered_per_s": round(whole.offered_rate, 4),
        "achieved_per_s": round(whole.achieved_rate, 4),
    }
    for name, run in runs.items():
        prefix = "" if name == "all" else f"{name}_"
        for percentile in PERCENTILES:
            seconds = run.latency_s(percentile)
            key = "most_s" if percentile == 100 else f"p{percentile:g}_s"
            fields[f"{prefix}{key}"] = None if math.isnan(seconds) else round(seconds, 4)
    return fields | {"void": whole.void}


def json_line(mix: str, seed: int, runs: dict[str, Run]) -> str:
    """Return the line of JSON."""
    return json.dumps({"replay": mix, "seed": seed, **values(runs)})


def write_histogram(run: Run, path: Path) -> None:
    """Write HdrHistogram's own text format, in seconds, which its plotters read."""
    with path.open("wb") as file:
        run.latencies.output_percentile_distribution(file, 1e6)


def _row(name: str, run: Run) -> tuple[str, ...]:
    counts = [str(run.outcomes[outcome]) for outcome in Outcome]
    seconds = [_seconds(percentile_s(run.latencies, percentile)) for percentile in PERCENTILES]
    return (name, str(len(run.answers)), *counts, *seconds)


def _seconds(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds:.2f} s"


def _line(row: Iterable[str], widths: Sequence[int]) -> str:
    first, *others = row
    cells = [f"{each:>{width}}" for each, width in zip(others, widths[1:], strict=True)]
    return "  ".join([f"{first:<{widths[0]}}", *cells])


INTERVAL_S = 10.0

Send = Callable[[PlannedRequest], Awaitable[Result]]


class Progress:
    """Counts what passes through `send`.

    Args:
        send: Sends a request.
        planned: Requests in all.
    """

    def __init__(self, send: Send, planned: int) -> None:
        self._send = send
        self._planned = planned
        self._sent = 0
        self._over: Counter[Outcome] = Counter()

    async def send(self, request: PlannedRequest) -> Result:
        """Send a request, and count it."""
        self._sent += 1
        outcome = Outcome.LATE  # unless it comes to another end than its deadline
        try:
            result = await self._send(request)
            outcome = result.outcome
            return result
        finally:
            self._over[outcome] += 1

    @asynccontextmanager
    async def shown(self, interval_s: float = INTERVAL_S) -> AsyncIterator[None]:
        """Write lines to stderr while the block runs."""
        showing = asyncio.create_task(self._show(interval_s))
        try:
            yield
        finally:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)

    async def _show(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            print(self, file=sys.stderr, flush=True)

    def __str__(self) -> str:
        ends = "".join(f", {count} {outcome}" for outcome, count in sorted(self._over.items()))
        waiting = self._sent - self._over.total()
        return f"{self._sent} of {self._planned} sent, {waiting} in flight{ends}"
