"""What do masked blocks and sparse convolutions gain an edit, by the share of tokens that its mask leaves to compute?

The suite's engine, with and without sparse convolutions, against stock Diffusers' inpainting: a process each, equal
threads, taking turns, medians. The model has the topology of SDXL or Stable Diffusion 2.1, recordings are in memory,
and masks are squares. First an exact edit is compared with Diffusers', so that what is timed is known to draw the same.
Last, the network alone: what a forward takes, by what is recorded of it.

A run takes 20 minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from load.bench.bench_model import write_bench_model
from load.bench.edit_model import (
    EDIT_SHAPE,
    MARGIN,
    RATIOS,
    SD21_EDIT_SHAPE,
    SD21_TOKEN,
    SIZE,
    TOKEN,
    square_box,
    square_mask,
    template,
    write_template,
)
from load.bench.framework import PROMPT, Bench, Option, Sheet, by_turns
from load.bench.side_process import Answer, Side
from load.bench.stock import LATENT, stock

if TYPE_CHECKING:
    from torch import Tensor

    from bottega.model.rows import Half, Row

SIDES = ("diffusers", "suite", "suite-sparse")
SHAPES = {"sdxl": EDIT_SHAPE, "sd21": SD21_EDIT_SHAPE}
TOKENS = {"sdxl": TOKEN, "sd21": SD21_TOKEN}
WANTED: Mapping[str, Mapping[str, float]] = {
    "sdxl": {"speedup_19": 2.2, "speedup_19_sparse": 3.0, "speedup_05_sparse": 4.0, "transformer_share": 0.8},
    "sd21": {"speedup_19": 1.3},  # InstGenIE's, on its GPU
}
# Of fp32 latents.
TOLERANCE = 1e-4
# What is recorded of a forward; nothing of a plain one.
CACHINGS = ("plain", "outputs", "keys_values")
# Of all recordings. One template's with sparse convolutions takes 50 MB a step.
_ACTIVATIONS_BYTES = 4 << 30
# Tokens of CLIP's prompts.
_PROMPT_TOKENS = 77
BENCH = Bench(
    __file__,
    __doc__,
    Option("--rounds", 3, "of all shares, on each side", smallest=1),
    Option("--steps", 11, "of each edit; one less runs", smallest=3),
    Option("--threads", 2, "of each side"),
    Option("--topology", "sdxl", "of the model", choices=tuple(SHAPES)),
    Option("--shares", list(RATIOS), "of tokens that masks have", choices=RATIOS, smallest=[0.05, 0.19]),
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
    write_bench_model(model, SHAPES[topology].for_run(smallest=options.smallest))
    if topology != "sdxl":
        sheet.bench = f"edit-{topology}"
    with ExitStack() as stack:

        def side(make: Callable[..., Answer], **arguments: object) -> Side:
            return stack.enter_context(
                Side(make, threads=options.threads, exclusive_cores=True, model=model, **arguments)
            )

        theirs = partial(_inpaint, side(stock), write_template(folder), options.steps, token)
        ours = {name: side(engine, sparse=name == SIDES[2], token=token) for name in SIDES[1:]}
        sides: dict[str, Ask] = {
            SIDES[0]: theirs,
            **{name: partial(each.ask, steps=options.steps) for name, each in ours.items()},
        }
        off = _largest_difference(sides, folder)
        for name in SIDES[1:]:  # of the least mask: what is recorded is then the template, all but that
            sides[name](share=min(options.shares), seed=0)
        found: Rounds = {
            share: by_turns(
                {name: partial(_with_seed, ask, share) for name, ask in sides.items()},
                options.rounds,
            )
            for share in options.shares
        }
    with Side(network, threads=options.threads, exclusive_cores=True, model=model, token=token) as alone:
        shares = [alone.ask()["share"] for _ in range(options.rounds + 1)][1:]
        forwards = {
            share: by_turns(
                {name: partial(_forward, alone, share, name) for name in CACHINGS},
                options.rounds,
            )
            for share in options.shares
        }
    fill(sheet, found, forwards, transformer_share=median(shares), off=off, wanted=WANTED[topology])
    if off > TOLERANCE:
        print(f"an exact edit is off by {off:.1e}: nothing of the above counts", file=sys.stderr)
        return 1
    return 0


def fill(
    sheet: Sheet,
    edits: Rounds,
    forwards: Mapping[float, Mapping[str, Sequence[Mapping[str, float]]]],
    *,
    transformer_share: float,
    off: float,
    wanted: Mapping[str, float] = WANTED["sdxl"],
) -> None:
    """Report medians over Diffusers, by share.

    Args:
        forwards: By share and what is recorded: seconds of one forward.
        transformer_share: Of a plain forward's time.
        off: The largest difference of an exact edit's latent.
        wanted: Bars by key.
    """
    bar = f"at most {TOLERANCE:g}"
    sheet.figure("an exact edit's latent off by", off, "{:.1e}", key="exact_off", bar=bar)
    bar = f"at least {wanted['transformer_share']:g}" if "transformer_share" in wanted else ""
    sheet.figure("transformers' share of a step", transformer_share, key="transformer_share", bar=bar)
    for share, by_side in edits.items():
        name = f"{share * 100:02.0f}"

        def over(
            side: str,
            field: str,
            of: Mapping[str, Sequence[Mapping[str, float]]] = by_side,
            base: str = SIDES[0],
        ) -> float:
            return median(each[field] for each in of[base]) / median(each[field] for each in of[side])

        what = f"mask {share:g}: tokens computed"
        sheet.figure(what, by_side[SIDES[2]][0]["computed_share"], "{:.3f}", key=f"computed_share_{name}")
        sheet.values[f"reused_{name}"] = min(each["reused"] for side in SIDES[1:] for each in by_side[side])
        for what, key, value in (
            (f"{share:g}: steps, convolutions in full", f"speedup_{name}", over("suite", "denoise_s")),
            (f"{share:g}: steps, sparse", f"speedup_{name}_sparse", over(SIDES[2], "denoise_s")),
            (f"{share:g}: the whole edit, sparse", f"speedup_{name}_sparse_whole", over(SIDES[2], "seconds")),
            (
                "one forward, sparse, outputs recorded",
                f"forward_{name}_outputs",
                over("outputs", "seconds", forwards[share], "plain"),
            ),
            (
                "one forward, sparse, keys and values recorded",
                f"forward_{name}_keys_values",
                over("keys_values", "seconds", forwards[share], "plain"),
            ),
        ):
            bar = f"at least {wanted[key]:g}" if key in wanted else ""
            sheet.figure(f"    {what}", value, "{:.2f} x", key=key, bar=bar)


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
    theirs = latents.pop(SIDES[0])
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
        order = edit_order("edit", image, square_mask(share, token), steps=steps, seed=seed, masked=not exact)
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


def network(*, model: str, token: int = TOKEN) -> Answer:
    """Make the network alone.

    It answers the seconds of one forward of a guided request's two rows, or without a question the share of a plain
    forward that transformers take.
    """
    return Network(Path(model), token).answer


class Network:
    """The network, and what was recorded of it so far."""

    def __init__(self, model: Path, token: int) -> None:
        import torch
        from diffusers import UNet2DConditionModel

        from bottega.engine.denoiser import Denoiser
        from bottega.engine.forward import Network as Networks
        from bottega.model.backbone import UNetBackbone
        from bottega.model.rows import Half

        self._token = token
        self._unet = UNet2DConditionModel.from_pretrained(model, subfolder="unet", torch_dtype=torch.float32).eval()
        self._backbone = UNetBackbone(self._unet)
        self._plain = Denoiser(Networks(backbone=self._backbone))
        self._rows = [_row(self._unet.config, half) for half in Half]
        self._recorded: dict[str, tuple[Denoiser, list[InMemory]]] = {}
        self._masks: dict[float, Tensor] = {}

    def answer(self, *, share: float = 0.0, caching: str = "") -> dict[str, float]:
        """Run one forward.

        Args:
            share: Of tokens that the mask has, with its margin.
            caching: One of `CACHINGS`; "" measures transformers.
        """
        if not caching:
            return {"share": self._transformer_share()}
        return {"seconds": self._plain_s() if caching == "plain" else self._masked_s(share, caching)}

    def _plain_s(self) -> float:
        return self._plain.predict(self._rows).seconds

    def _masked_s(self, share: float, caching: str) -> float:
        from bottega.addons.edits.engine.activations import EditActivations

        denoiser, recordings = self._recordings(caching)
        # Masks stay the same tensors, as in an edit's steps.
        mask = self._masks.setdefault(share, _computed(share, self._token))
        edits = [EditActivations(computed=mask, recorded=recorded) for recorded in recordings]
        rows = [replace(row, activations=edit) for row, edit in zip(self._rows, edits, strict=True)]
        return float(denoiser.predict(rows).seconds)

    def _recordings(self, caching: str) -> tuple[Any, list[InMemory]]:
        from bottega.addons.edits.engine.activations import EditActivations
        from bottega.addons.edits.engine.masked.backbone import MaskedBackbone
        from bottega.addons.edits.engine.masked.transformer import Caching
        from bottega.addons.edits.engine.sparse import SparseMaps
        from bottega.engine.denoiser import Denoiser
        from bottega.engine.forward import Network as Networks

        if caching not in self._recorded:
            backbone = MaskedBackbone(self._unet, caching=Caching(caching), maps=SparseMaps())
            sinks = [InMemory() for _ in self._rows]
            edits = [EditActivations(sink=sink) for sink in sinks]
            denoiser = Denoiser(Networks(backbone=self._backbone, strategies=(backbone,)))
            denoiser.predict([replace(row, activations=edit) for row, edit in zip(self._rows, edits, strict=True)])
            self._recorded[caching] = denoiser, sinks
        return self._recorded[caching]

    def _transformer_share(self) -> float:
        from diffusers.models.transformers.transformer_2d import Transformer2DModel

        times: list[float] = []
        handles = []
        for module in self._unet.modules():
            if isinstance(module, Transformer2DModel):
                handles.append(module.register_forward_pre_hook(lambda *_: times.append(-perf_counter())))
                handles.append(module.register_forward_hook(lambda *_: times.append(perf_counter())))
        seconds = self._plain_s()
        for handle in handles:
            handle.remove()
        return sum(times) / seconds


class InMemory:
    """Recorded activations of one row, all of them in memory."""

    projections = None
    reused: frozenset[str] = frozenset()
    waited_s = 0.0

    def __init__(self) -> None:
        self._outputs: dict[str, Tensor] = {}

    def get(self, name: str) -> Tensor | None:
        """Return a layer's output."""
        return self._outputs.get(name)

    stored = get

    def put(self, name: str, output: Tensor) -> None:
        """Keep a copy."""
        self._outputs[name] = output.half()


def _row(config: Any, half: Half) -> Row:
    """Return a row with random inputs, of the sizes that the network has."""
    import torch

    from bottega.model.rows import Embeds, Row

    generator = torch.Generator().manual_seed(half.value)
    prompt, added = torch.randn(_PROMPT_TOKENS, config.cross_attention_dim, generator=generator), {}
    if config.addition_embed_type is not None:
        # Pooled text and six sizes make up what the added embedding takes.
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        added = {"text_embeds": torch.randn(pooled, generator=generator), "time_ids": torch.zeros(6)}
    embeds = Embeds(prompt=prompt, added=added)
    sample = torch.randn(config.in_channels, config.sample_size, config.sample_size, generator=generator)
    return Row(owner=0, step=0, half=half, sample=sample, timestep=torch.tensor(501.0), embeds=embeds)


def _computed(share: float, token: int) -> Tensor:
    """Return the map of latent elements that an edit with this mask computes."""
    import torch

    from bottega.addons.edits.engine.masked.tokens import dilate

    pixels = SIZE // EDIT_SHAPE.sample_size
    mask = torch.from_numpy(square_mask(share, token) > 0)[::pixels, ::pixels]
    return dilate(mask, MARGIN, token // pixels)


if __name__ == "__main__":
    sys.exit(BENCH.command())
