"""What turns of edits cost, fitted to an engine in this process: seconds by rows and by the tokens that they compute.

A row of which a part is computed costs a fixed share of a plain one, and the rest in proportion to that part: a linear
regression over turns of many compositions says how much that is.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bottega.addons.edits.planning.work_fit import WorkFit
from bottega.diffusion.engine.engine import Engine
from bottega.diffusion.engine.events import JobFailed
from bottega.diffusion.engine.limits import EngineLimits
from load.bench.bench_model import write_bench_model
from load.bench.edit_desk import EditDesk
from load.bench.edit_model import EDIT_SHAPE
from load.bench.scratch import scratch

_SHARES = (0.02, 0.05, 0.11, 0.19, 0.27, 0.35, 0.5, 0.7)
_WIDTHS = (1, 2, 3, 4, 6)
_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCosts:
    """turn_s: seconds of any turn; row_s: of each plain row in it, of which fixed_share does not shrink with its
    tokens. encode_s, decode_s: of an edit, between two turns. r2: over turns that were held out of the fit.
    """

    turn_s: float
    row_s: float
    fixed_share: float
    encode_s: float
    decode_s: float
    r2: float

    def row_equivalents(self, share: float) -> float:
        """Of a row of which this share of the tokens is computed."""
        return self.fixed_share + (1.0 - self.fixed_share) * share

    def seconds(self, row_equivalents: float) -> float:
        """Of a turn."""
        return self.turn_s + self.row_s * row_equivalents


def measured(*, threads: int, rounds: int) -> TurnCosts:
    """Those of the bench model of edits on this machine."""
    with scratch() as folder:
        write_bench_model(folder / "model", EDIT_SHAPE)
        return _measured(folder / "model", threads=threads, rounds=rounds)


def _measured(model: Path, *, threads: int, rounds: int) -> TurnCosts:
    desk = EditDesk(model, steps=(_STEPS,), threads=threads)
    engine = desk.engine(EngineLimits(max_rows=2 * max(_WIDTHS), max_wait_turns=0))  # all that are here share a turn
    desk.record(engine)
    chance = random.Random("scheduling costs")
    turns: dict[tuple[int, float], list[float]] = {}
    for number in range(rounds):
        for width in _WIDTHS:
            for first in range(len(_SHARES)):
                shares = [_SHARES[(first + 3 * place) % len(_SHARES)] for place in range(width)]
                for place, share in enumerate(shares):
                    engine.submit(desk.order(f"{number}-{width}-{first}-{place}", share, chance, _STEPS))
                rows, tokens, seconds = _turn(engine)
                turns.setdefault((rows, round(tokens, 6)), []).append(seconds)
    fit = WorkFit()
    for (rows, tokens), taken_s in turns.items():
        # The tokens stand for the operations, and the rows for what each moves whatever is masked.
        fit.observe(flops=tokens, size_bytes=float(rows), seconds=median(taken_s))
    cost = fit.cost
    assert cost is not None
    row_s = cost.per_flop_s + cost.per_byte_s
    return TurnCosts(
        turn_s=cost.fixed_s,
        row_s=row_s,
        fixed_share=cost.per_byte_s / row_s,
        encode_s=engine.fixed_s / 2,
        decode_s=engine.fixed_s / 2,
        r2=fit.r2 or 0.0,
    )


def _turn(engine: Engine) -> tuple[int, float, float]:
    """Draws all that is here: rows, computed tokens (in rows) and seconds of the last turn that all of it shared."""
    seen: list[tuple[int, float, float]] = []
    predict = engine._denoiser.predict

    def timed(rows):  # type: ignore[no-untyped-def]
        prediction = predict(rows)
        tokens = sum(1.0 if row.activations is None else row.activations.share for row in rows)
        seen.append((len(rows), tokens, prediction.seconds))
        return prediction

    engine._denoiser.predict = timed  # type: ignore[method-assign]
    try:
        while engine.busy:
            for event in engine.turn():
                if isinstance(event, JobFailed):
                    raise event.error
    finally:
        engine._denoiser.predict = predict  # type: ignore[method-assign]
    most = max(rows for rows, _, _ in seen)
    return next(turn for turn in reversed(seen) if turn[0] == most)
