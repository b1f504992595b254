"""What do masked blocks and sparse convolutions gain an edit, by the share of tokens that its mask leaves to compute?

The suite's engine, with and without sparse convolutions, against stock Diffusers' inpainting: a process each, equal
threads, taking turns, medians. The model has the topology of SDXL, Stable Diffusion 2.1 or 3, or Flux.1 schnell,
recordings are in memory, and masks are squares. First an exact edit is compared with Diffusers', so that what is timed
is known to draw the same. Then the network alone: what a forward takes if outputs of blocks are in memory, and if keys
and values are too, and what their operations allow. Last, with a transformer, an edit whose recording is loaded as fast
as it computes, as `edit-loading` measures it.

A run takes 20 minutes on two cores, 40 with Stable Diffusion 3, and 70 with Flux.1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from load.bench.bench_model import BenchShape, write_bench_model
from load.bench.edit_loading import load_by_turns
from load.bench.edit_model import (
    EDIT_SHAPE,
    FLUX_EDIT_SHAPE,
    RATIOS,
    SD3_EDIT_SHAPE,
    SD21_EDIT_SHAPE,
    SD21_TOKEN,
    TOKEN,
    square_box,
    square_mask,
    template,
    write_template,
)
from load.bench.edit_network import CACHINGS, PLAIN, network
from load.bench.framework import PROMPT, Bench, Option, Sheet, by_turns
from load.bench.side_process import Answer, Side
from load.bench.stock import LATENT, stock
from load.bench.transformer_model import TransformerShape, write_transformer_model

DIFFUSERS = "diffusers"
# The suite's, and the end of their figures' keys. Transformers have no convolutions.
SIDES = {"suite": "", "suite-sparse": "_sparse"}
SHAPES: Mapping[str, BenchShape | TransformerShape] = {
    "sdxl": EDIT_SHAPE,
    "sd21": SD21_EDIT_SHAPE,
    "sd3": SD3_EDIT_SHAPE,
    "flux": FLUX_EDIT_SHAPE,
}
TOKENS = {"sdxl": TOKEN, "sd21": SD21_TOKEN, "sd3": TOKEN, "flux": TOKEN}
# Of tokens that masks have. The square of .19 has less than the .2 of the bar of transformers.
SHARES = {"sdxl": RATIOS, "sd21": RATIOS, "sd3": (0.05, 0.22), "flux": (0.05, 0.22)}
WANTED: Mapping[str, Mapping[str, float]] = {
    "sdxl": {"speedup_19": 2.2, "speedup_19_sparse": 3.0, "speedup_05_sparse": 4.0, "transformer_share": 0.8},
    "sd21": {"speedup_19": 1.3},  # InstGenIE's, on its GPU
    "sd3": {"speedup_22": 1.9, "plan_over_loadfree": 1.05},  # InstGenIE's, of Flux
    "flux": {"speedup_22": 1.9, "plan_over_loadfree": 1.05},
}
# Of fp32 latents.
TOLERANCE = 1e-4
# Of all recordings. One template's with sparse convolutions takes 50 MB a step.
_ACTIVATIONS_BYTES = 4 << 30
BENCH = Bench(
    __file__,
    __doc__,
    Option("--rounds", 3, "of all shares, on each side", smallest=1),
    Option("--steps", 11, "of each edit; of a UNet one less runs", smallest=3),
    Option("--threads", 2, "of each side"),
    Option("--topology", "sdxl", "of the model", choices=tuple(SHAPES)),
    Option(
        "--shares",
        [],
        "of tokens that masks have; by default those of the topology",
        kind=float,
        choices=tuple(sorted({share for shares in SHARES.values() for share in shares})),
        smallest=[0.05, 0.22],
    ),
)

Edited = Mapping[str, float]
"""An edit: seconds, and denoise_s of its steps; of the suite also computed_share and reused."""
Ask = Callable[..., Edited]
Rounds = Mapping[float, Mapping[str, Sequence[Edited]]]
"""Edits by share and side, one for each round."""


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> int:
    """Check an exact edit, record, and draw in turns."""
    model, topology, token = folder / "model", options.topology, TOKENS[options.topology]
    shape, wanted = SHAPES[topology].for_run(smallest=options.smallest), WANTED[topology]
    convolves = isinstance(shape, BenchShape)
    if isinstance(shape, BenchShape):
        write_bench_model(model, shape)
    else:
        write_transformer_model(model, shape)
    names, shares = list(SIDES) if convolves else list(SIDES)[:1], options.shares or SHARES[topology]
    if topology != "sdxl":
        sheet.bench = f"edit-{topology}"
    with ExitStack() as stack:

        def side(make: Callable[..., Answer], **arguments: object) -> Side:
            return stack.enter_context(
                Side(make, threads=options.threads, exclusive_cores=True, model=model, **arguments)
            )

        theirs = partial(_inpaint, side(stock), write_template(folder), options.steps, token)
        ours = {name: side(engine, sparse=SIDES[name] == "_sparse", token=token) for name in names}
        sides: dict[str, Ask] = {
            DIFFUSERS: theirs,
            **{name: partial(each.ask, steps=options.steps) for name, each in ours.items()},
        }
        off = _largest_difference(sides, folder)
        for name in names:  # of the least mask: what is recorded is then the template, all but that
            sides[name](share=min(shares), seed=0)
        found: Rounds = {
            share: by_turns({name: partial(_with_seed, ask, share) for name, ask in sides.items()}, options.rounds)
            for share in shares
        }
    bar = f"at most {TOLERANCE:g}"
    sheet.figure("an exact edit's latent off by", off, "{:.1e}", key="exact_off", bar=bar)
    with Side(network, threads=options.threads, exclusive_cores=True, model=model, token=token) as alone:
        if convolves:
            part = median([alone.ask()["share"] for _ in range(options.rounds + 1)][1:])
            bar = f"at least {wanted['transformer_share']:g}" if "transformer_share" in wanted else ""
            sheet.figure("transformers' share of a step", part, key="transformer_share", bar=bar)
        forwards = {
            share: by_turns(
                {name: partial(_forward, alone, share, name) for name in (PLAIN, *CACHINGS)}, options.rounds
            )
            for share in shares
        }
    fill(sheet, found, forwards, wanted=wanted)
    if not convolves:
        _fill_loading(sheet, folder, options, share=max(shares), bar=f"at most {wanted['plan_over_loadfree']:g}")
    if off > TOLERANCE:
        print(f"an exact edit is off by {off:.1e}: nothing of the above counts", file=sys.stderr)
        return 1
    return 0


def fill(
    sheet: Sheet,
    edits: Rounds,
    forwards: Mapping[float, Mapping[str, Sequence[Mapping[str, float]]]],
    *,
    wanted: Mapping[str, float],
) -> None:
    """Report medians over Diffusers, by share.

    Args:
        forwards: By share and what is in memory: seconds of one forward, MiB that a recording of it has, and how many
            times as fast it may be by its transformer blocks' operations.
        wanted: Bars by key.
    """
    for share, by_side in edits.items():
        name, ours = f"{share * 100:02.0f}", [side for side in by_side if side != DIFFUSERS]
        last = ours[-1]
        what = f"mask {share:g}: tokens computed"
        sheet.figure(what, by_side[last][0]["computed_share"], "{:.3f}", key=f"computed_share_{name}")
        sheet.values[f"reused_{name}"] = min(each["reused"] for side in ours for each in by_side[side])
        rows = [
            (f"steps, {side}", f"speedup_{name}{SIDES[side]}", _over(by_side, DIFFUSERS, side, "denoise_s"))
            for side in ours
        ]
        whole = _over(by_side, DIFFUSERS, last, "seconds")
        rows.append((f"the whole edit, {last}", f"speedup_{name}{SIDES[last]}_whole", whole))
        allowed = forwards[share]["outputs"][0]["allowed"]
        rows.append(("by operations that are needed, keys and values projected", f"allowed_{name}", allowed))
        for caching, what in CACHINGS.items():
            over = _over(forwards[share], PLAIN, caching, "seconds")
            rows.append((f"one forward, {what} in memory", f"forward_{name}_{caching}", over))
        for what, key, value in rows:
            bar = f"at least {wanted[key]:g}" if key in wanted else ""
            sheet.figure(f"    {what}", value, "{:.2f} x", key=key, bar=bar)
    for caching, what in CACHINGS.items():
        mib = forwards[share][caching][0]["mib"]
        sheet.figure(f"a step's {what}, in half precision", mib, "{:.1f} MiB", key=f"step_mib_{caching}")


def _over(sides: Mapping[str, Sequence[Mapping[str, float]]], base: str, side: str, field: str) -> float:
    return median(each[field] for each in sides[base]) / median(each[field] for each in sides[side])


def _fill_loading(sheet: Sheet, folder: Path, options: argparse.Namespace, *, share: float, bar: str) -> None:
    """Report what loading costs, if it takes as long as computing the mask. The store and its link have a core."""
    loading = argparse.Namespace(
        rounds=options.rounds,
        steps=options.steps,
        share=share,
        threads=max(1, options.threads - 1),
        speeds=["doubling"],
    )
    measured = load_by_turns(folder, folder / "model", loading)
    ratio = measured.over_load_free("doubling")
    sheet.figure("steps with a recording that is loaded, over one in memory", ratio, key="plan_over_loadfree", bar=bar)


def _with_seed(ask: Ask, share: float, seed: int) -> Edited:
    return ask(share=share, seed=seed)


def _forward(side: Side, share: float, caching: str, _: int) -> Mapping[str, float]:
    return side.ask(share=share, caching=caching)


def _inpaint(
    side: Side, image: str, steps: int, token: int, *, share: float, seed: int = 0, latent: str = "", **_: Any
) -> Edited:
    box = square_box(share, token)
    return side.ask(prompts=[PROMPT], seeds=[seed], steps=steps, images=[image], boxes=[box], latent=latent)


def _largest_difference(sides: Mapping[str, Ask], folder: Path) -> float:
    """Return the largest difference of the suite's latents from Diffusers', all computed."""
    from safetensors.torch import load_file

    latents = {}
    for name, ask in sides.items():
        file = folder / f"{name}.safetensors"
        ask(share=0.19, exact=True, latent=str(file))
        latents[name] = load_file(file)[LATENT]
    theirs = latents.pop(DIFFUSERS)
    return max(float((ours - theirs).abs().max()) for ours in latents.values())


def engine(*, model: str, sparse: bool, token: int = TOKEN) -> Answer:
    """Make the suite's engine, with recordings in its memory; it draws one edit of the template.

    Args:
        sparse: Whether convolutions are computed around masks alone.
        token: Pixels a side of a token of the model's finest attention level.
    """
    from safetensors.torch import save_file

    from bottega.addons.edits.engine.addon import EngineEdits
    from bottega.addons.edits.engine.recordings.source import MemoryActivations
    from bottega.engine.engine import Engine
    from bottega.engine.events import Event, JobStarted
    from bottega.engine.limits import EngineLimits
    from load.bench.engine_runs import accelerate, edit_order, load_bench_model, run_orders

    loaded = load_bench_model(model)
    running = Engine(
        loaded, EngineLimits(), addons=(EngineEdits(loaded, MemoryActivations(_ACTIVATIONS_BYTES), sparse=sparse),)
    )
    accelerate(running)
    running.warm_up()
    image = template()
    requests: list[Any] = []
    turn = running.turn

    def watched() -> Sequence[Event]:
        """Make a turn, and keep the request that has started."""
        events = list(turn())
        requests.extend(running.jobs[event.key].requests[0] for event in events if isinstance(event, JobStarted))
        return events

    running.turn = watched  # type: ignore[method-assign,assignment]

    def draw(*, share: float, steps: int, seed: int = 0, exact: bool = False, latent: str = "") -> Edited:
        requests.clear()
        order = edit_order(
            "edit",
            image,
            square_mask(share, token),
            steps=steps,
            seed=seed,
            masked=not exact,
            sampler=loaded.defaults.sampler,
        )
        began_s = perf_counter()
        record = run_orders(running, [order])["edit"]
        seconds = perf_counter() - began_s
        if latent:
            save_file({LATENT: requests[0].latent.contiguous()}, latent)
        edited = record.provenance
        return {
            "seconds": seconds,
            "denoise_s": record.seconds["denoise"] + record.seconds["batch"],
            "computed_share": edited.mask.computed_share or 1.0,
            "reused": edited.blocks_reused / edited.blocks_total if edited.blocks_total else 0.0,
        }

    return draw


if __name__ == "__main__":
    sys.exit(BENCH.command())
