"""What an approximate cache saves on a stream of prompts, by budget and eviction policy.

Prompts of load/replay/prompt_stream.py, embedded by the miniature's own text encoder, are asked one after the other of
the real store, cold at first, in this process; no picture is drawn. Every policy sees the same stream. Then the first
prompts of the stream are drawn by the whole suite, without and with the cache.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bottega.addons.cache.planning.eviction import FIFO, LCBFU, LFU, LRU, EvictionPolicy, decayed_lcbfu
from bottega.v1.cache_pb2 import CacheProfile
from load.bench.cache_predictor import predict, retrain_s
from load.bench.cache_replay import STEPS, Replayed, profile, replay
from load.bench.cache_thresholds import thresholds
from load.bench.cache_throughput import WANTED_P99, Timed, measure
from load.bench.report import report
from load.bench.scratch import scratch
from load.replay.prompt_stream import StreamShape, prompts

BUDGETS = (15, 150, 1500, 15000)
OTHERS = (LRU, LFU, FIFO)
# Prompts in which a use loses half its worth, as a share of the latents that have room.
HALF_LIFE_OF_BUDGET = 0.5
# Of Nirvana, Table 3; the rate may be .03 off.
WANTED_SAVED, WANTED_HITS, HITS_TOLERANCE = 0.23, 0.93, 0.03
# Seconds of a guided step of the embedded model alone.
STEP_S = 0.022
WANTED_RETRAIN_S = 0.1
_MEMORY = Path("/dev/shm")
_EMBED_ROWS = 256

Key = tuple[int, str]


def embed(texts: Sequence[str]) -> NDArray[np.float32]:
    """Unit vectors [texts, width], by the miniature's second text encoder."""
    import torch

    from bottega.quality.clip import load_miniature

    clip = load_miniature()
    different = sorted(set(texts))
    parts = [clip.embed_texts(different[at : at + _EMBED_ROWS]) for at in range(0, len(different), _EMBED_ROWS)]
    vectors = torch.nn.functional.normalize(torch.cat(parts), dim=-1).numpy()
    places = {text: place for place, text in enumerate(different)}
    found: NDArray[np.float32] = vectors[[places[text] for text in texts]]
    return found


def policies(budget: int) -> tuple[EvictionPolicy, ...]:
    """LCBFU, what it is compared with, and its variant that forgets."""
    return (LCBFU, *OTHERS, decayed_lcbfu(max(1.0, HALF_LIFE_OF_BUDGET * budget)))


def compare(
    folder: Path, vectors: NDArray[np.float32], measured: CacheProfile, budgets: Sequence[int]
) -> dict[Key, Replayed]:
    """By budget and policy."""
    found: dict[Key, Replayed] = {}
    for budget in budgets:
        for policy in policies(budget):
            place, began_s = folder / f"{budget}-{policy.name}", time.perf_counter()
            one = found[budget, policy.name] = replay(place, vectors, measured, policy=policy, latents=budget)
            shutil.rmtree(place)
            took_s = time.perf_counter() - began_s
            print(f"{budget} latents, {policy.name}: {one.saved:.4f} saved, in {took_s:.0f} s", flush=True)
    return found


def vs_best_other(found: dict[Key, Replayed], budget: int) -> float:
    """What LCBFU saves, over what the best of the others does."""
    best = max(found[budget, policy.name].saved for policy in OTHERS)
    return found[budget, LCBFU.name].saved / best if best else 1.0


def _policy_figures(
    found: dict[Key, Replayed], budgets: Sequence[int]
) -> tuple[list[tuple[str, str, str]], dict[str, float]]:
    rows: list[tuple[str, str, str]] = []
    values: dict[str, float] = {}
    for budget in budgets:
        for policy in policies(budget):
            one = found[budget, policy.name]
            said = f"{one.saved:.4f}, {one.hit_rate:.3f}, {one.statistics.holes}, {one.statistics.evictions}"
            rows.append((f"{budget} latents, {policy.name}: saved, hits, holes, evictions", said, ""))
            values[f"{policy.name.replace('-', '_')}_saved_{budget}"] = one.saved
        ratio = vs_best_other(found, budget)
        rows.append(("    LCBFU over the best of LRU, LFU and FIFO", f"{ratio:.4f}", ">= 1"))
        values[f"lcbfu_vs_best_other_{budget}"] = ratio
    largest = found[max(budgets), LCBFU.name]
    by_step = ", ".join(f"{step}: {largest.by_step[step] / largest.prompts:.3f}" for step in sorted(largest.by_step))
    rows += [
        (f"saved by LCBFU with {max(budgets)} latents", f"{largest.saved:.4f}", f">= {WANTED_SAVED}"),
        ("    hits", f"{largest.hit_rate:.3f}", f"{WANTED_HITS} within {HITS_TOLERANCE}"),
        (f"    hits by step of {STEPS}", by_step, ""),
    ]
    least = min(vs_best_other(found, budget) for budget in budgets)
    summary = {"lcbfu_vs_best_other_min": least, "lcbfu_saved_largest": largest.saved, "hit_rate": largest.hit_rate}
    return rows, summary | values


def _predictor_figures(
    vectors: NDArray[np.float32], least: float
) -> tuple[list[tuple[str, str, str]], dict[str, float]]:
    """With the index as it is, and with one so slow that the predictor pays. least: similarity of a hit."""
    saved_s = WANTED_SAVED / WANTED_HITS * STEPS * STEP_S
    fast = predict(vectors, least, saved_s=saved_s)
    slow_s = 4.0 * fast.break_even * saved_s
    slow = predict(vectors, least, saved_s=saved_s, lookup_s=slow_s)
    trained_s = retrain_s(vectors)
    rates = f"{fast.precision:.3f}, {fast.recall:.3f}, {fast.specificity:.3f}"
    pays = f"look-ups of {1000 * fast.break_even * saved_s:.0f} ms, {fast.break_even:.2f} of what a hit saves"
    rows = [
        ("predictor: precision, recall, specificity", rates, ""),
        ("    pays from", pays, ""),
        (f"    with look-ups of {1000 * fast.lookup_s:.2f} ms", f"on at {fast.on:.0%} of the questions", "0 %"),
        (f"    with look-ups of {1000 * slow_s:.0f} ms", f"on at {slow.on:.0%}", "most"),
        ("    trained on 10,000 records", f"{trained_s:.3f} s", f"<= {WANTED_RETRAIN_S} s"),
    ]
    values = {
        "precision": fast.precision,
        "recall": fast.recall,
        "specificity": fast.specificity,
        "predictor_break_even": fast.break_even,
        "predictor_on_fast": fast.on,
        "predictor_on_slow": slow.on,
        "lookup_ms": 1000 * fast.lookup_s,
        "retrain_s": trained_s,
    }
    return rows, values


def _suite_figures(timed: Timed) -> tuple[list[tuple[str, str, str]], dict[str, float]]:
    rows = [
        (f"through the suite: saved, of {len(timed.skipped)} prompts", f"{timed.saved:.3f}", ""),
        ("    pictures a second over those without", f"{timed.throughput_ratio:.3f}", f">= {timed.wanted_ratio:.3f}"),
        ("    p99 over median", f"{timed.p99_over_median:.3f}", f"<= {WANTED_P99}"),
    ]
    values = {
        "suite_saved": timed.saved,
        "throughput_ratio": timed.throughput_ratio,
        "throughput_of_wanted": timed.throughput_ratio / timed.wanted_ratio,
        "p99_over_median": timed.p99_over_median,
    }
    return rows, values


def main() -> None:
    """Prints the table and the line of JSON."""
    shape = StreamShape()
    parser = argparse.ArgumentParser(prog="make bench-cache", description=__doc__)
    parser.add_argument("--prompts", type=int, default=20_000, help="of the stream (default: 20,000)")
    parser.add_argument("--budgets", type=int, nargs="+", default=list(BUDGETS), help="latents that have room")
    parser.add_argument("--seed", type=int, default=2, help="of the stream (default: 2)")
    parser.add_argument("--drift", type=float, default=shape.drift, help=f"new topics a session ({shape.drift})")
    parser.add_argument("--users", type=int, default=shape.users, help=f"at a time ({shape.users})")
    parser.add_argument("--session", type=float, default=shape.session, help=f"prompts of a session ({shape.session})")
    parser.add_argument("--suite", type=int, default=150, help="prompts drawn through the suite (default: 150)")
    parser.add_argument("--folder", type=Path, default=_MEMORY if _MEMORY.is_dir() else None, help="of the stores")
    options = parser.parse_args()
    stream = StreamShape(drift=options.drift, users=options.users, session=options.session)
    texts = prompts(options.prompts, stream, seed=options.seed)
    vectors = embed(texts)
    least = thresholds(vectors)
    print(f"{len(texts)} prompts, {len(set(texts))} different; thresholds {least}", flush=True)
    with scratch(options.folder) as folder:
        found = compare(folder, vectors, profile(least), options.budgets)
    rows, values = _policy_figures(found, options.budgets)
    its_rows, its_values = _predictor_figures(vectors, min(least.values()))
    rows, values = rows + its_rows, values | its_values
    if options.suite:
        # A stream of so few prompts has thresholds of its own.
        few = profile(thresholds(vectors[: options.suite]))
        with scratch() as folder:
            timed = measure(folder / "suite", texts[: options.suite], few, os.cpu_count() or 1)
        its_rows, its_values = _suite_figures(timed)
        rows, values = rows + its_rows, values | its_values
    report("cache", rows, values)


if __name__ == "__main__":
    main()
