"""What does it gain to run a ControlNet on a server of its own?

The suite with one ControlNet against serial Diffusers. Worker and server have a core and a thread each, the reference
has one; it runs the ControlNet first and then the UNet. The ideal follows from the parts' own times: the ControlNet
runs while the encoder half does. Beside it stands what is left of it where both cores compute at once, as they share
caches and memory. With `--topology sd3` or `flux`, the ControlNet runs while the whole transformer does, each of whose
blocks waits for one residual.

Then, for SDXL, the same over TCP behind a relay that is slowed down to where waiting for every step's residuals gains
little, against steps that go on with those of the step before; and how often the embedded model's pictures follow their
control images then. The mode is chosen by a profile and a slow link, and every picture's provenance has to name the one
meant.

A run takes 15 minutes on two cores.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

from bottega.client import Client, Completed, ControlNet, Picture, Progress
from bottega.miniature import WEIGHTS
from bottega.miniature.scenes import caption
from load.bench import miniature
from load.bench.bench_model import BenchShape, write_bench_controlnet, write_bench_model, write_gradient
from load.bench.controlnet_follow import CASES, Case, cases
from load.bench.controlnet_parts import PARTS, measure_parts
from load.bench.framework import GUIDANCE_SCALE, PROMPT, Bench, Option, Sheet
from load.bench.side_process import Answer, Side
from load.bench.stock import Stock
from load.bench.suites import check_apart, pinned, relayed, step_s, suite
from load.bench.throttle import Throttle
from load.bench.transformer_model import TransformerShape, write_transformer_controlnet, write_transformer_model

# The encoder half of a guided step takes more than 100 ms with one thread.
SHAPE = BenchShape(block_out_channels=(64, 128, 256), transformer_layers=(1, 4), sample_size=32)
TRANSFORMERS = {
    "sd3": TransformerShape(),
    "flux": TransformerShape(heads=3, blocks=8, single_blocks=16, control_blocks=4, control_single_blocks=8),
}
WARM_UPS = 2
# A step's residuals take about three times as long as its encoder half then.
FOLLOW_BYTES_PER_S = 8e6
_AT_ONCE, _LINK_WARM_UPS = 2, 3
BENCH = Bench(
    __file__,
    __doc__,
    Option("--requests", 8, "pictures on each side", smallest=1),
    Option("--steps", 12, "of a picture", smallest=4),
    Option("--rounds", 15, "of the parts alone", smallest=1),
    Option("--cases", CASES, "in which pictures shall follow; 0 leaves them out", smallest=1),
    Option("--only-near", False, "leave the slow link out"),
    Option("--topology", "sdxl", "of the model; of transformers only near", choices=("sdxl", "sd3", "flux")),
    Option("--slow-gain", 1.1, "what waiting for every step gains on the slow link"),
)


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Measure the parts, both sides near each other, then the slow link."""
    model, only_near = folder / "model", options.only_near or options.topology != "sdxl"
    net, side = _write(options, model, folder / "net")
    image = write_gradient(folder / "image.png", side)
    if options.topology != "sdxl":
        sheet.bench = f"controlnet-{options.topology}"
    requests = _Requests(model, net, image, side, options)
    with pinned(0):
        reference = Side(serial, threads=1, model=model, net=net, side=side)
    with reference:
        values = {**reference.ask(rounds=options.rounds)}
        with pinned(1):
            other = Side(serial, threads=1, model=model, net=net, side=side)
        with other, ThreadPoolExecutor(2) as pool:
            both = list(pool.map(lambda side: side.ask(rounds=options.rounds), (reference, other)))
        values |= {f"{name.removesuffix('_s')}_beside_s": mean(parts[name] for parts in both) for name in PARTS}
        values |= requests.near(folder / "memfd", reference)
        if not only_near:
            values |= requests.far(folder / "tcp", values["serial_step_s"])
        values |= {f"{name}_again": seconds for name, seconds in reference.ask(rounds=options.rounds).items()}
    if options.cases and not only_near:
        values |= _follow(folder / "follow", options.cases)
    _fill(sheet, values, options)


def _write(options: argparse.Namespace, model: Path, net: Path) -> tuple[Path, int]:
    """Write the model and a ControlNet; return the ControlNet's folder and the pixels a side of a picture."""
    if options.topology != "sdxl":
        transformer = TRANSFORMERS[options.topology].for_run(smallest=options.smallest)
        write_transformer_model(model, transformer)
        return write_transformer_controlnet(net, transformer, seed=1), transformer.side
    shape = SHAPE.for_run(smallest=options.smallest)
    write_bench_model(model, shape)
    return write_bench_controlnet(model, net, shape, seed=1), shape.side


@contextmanager
def _running(folder: Path, model: str, net: Path, links: Mapping[str, object] | None = None) -> Iterator[Client]:
    """Run a worker on the first core and a ControlNet server on the second, with a thread each."""
    server = {"threads": 1, **({"links": links} if links else {})}
    services: Mapping[str, Mapping[str, object]] = {
        "controlnet": {"engine": server, "controlnets": {"edges": str(net)}},
        "worker": {"engine": {"model": model, "threads": 1}},
    }
    with suite(folder, services, cores={"controlnet": 1, "worker": 0}) as running:
        check_apart(running.members["worker"], running.members["controlnet"])
        yield running.client


class _Requests:
    """Pictures with one ControlNet."""

    def __init__(self, model: Path, net: Path, image: Path, side: int, options: argparse.Namespace) -> None:
        self._model = model
        self._net = net
        self._image = image
        self._side = side
        self._options = options

    def near(self, folder: Path, reference: Side) -> dict[str, float]:
        """Draw serially and with the suite in turns, linked by shared memory."""
        serial_s, steps_s, ours = [], [], []
        steps = self._options.steps
        with _running(folder, str(self._model), self._net) as client:
            for seed in range(WARM_UPS + self._options.requests):
                plain = reference.ask(image=str(self._image), seed=seed, steps=steps)["step_s"]
                picture, seconds = self._watched(client, seed)
                if seed >= WARM_UPS:
                    serial_s.append(plain)
                    steps_s.append(seconds)
                    ours.append(picture)
        return {
            "serial_step_s": median(serial_s),
            "suite_step_s": median(steps_s),
            "suite_mean_step_s": median(map(step_s, ours)),
            "suite_encoder_s": median(picture.provenance.encoder_s / steps for picture in ours),
            "waited_s": median(picture.provenance.controlnets[0].waited_s / steps for picture in ours),
        }

    def far(self, folder: Path, serial_step_s: float) -> dict[str, float]:
        """Draw synchronously and pipelined in turns, on one slow link."""
        synchronous, pipelined = [], []
        with Throttle() as throttle, _running(folder, str(self._model), self._net, relayed(throttle)) as client:
            client.set_controlnet_profile("edges", similarity=1.0, num_inference_steps=1)
            self._draw(client, 0)
            self._slow_down(client, throttle, serial_step_s / self._options.slow_gain)
            for seed in range(WARM_UPS + self._options.requests):
                waiting = self._draw(client, seed, stale_residuals=False)
                going_on = self._draw(client, seed, stale_residuals=True)
                if seed >= WARM_UPS:
                    synchronous.append(step_s(waiting))
                    pipelined.append(going_on)
        return {
            "slow_bytes_per_s": throttle.bytes_per_s,
            "synchronous_step_s": median(synchronous),
            "pipelined_step_s": median(map(step_s, pipelined)),
            "stale_steps": median(picture.provenance.controlnets[0].stale_steps for picture in pipelined),
        }

    def _slow_down(self, client: Client, throttle: Throttle, wanted_s: float) -> None:
        """Find by trying at how many bytes a second a synchronous step takes so long."""
        low, high = 1e6, 1e9
        for _ in range(8):
            throttle.bytes_per_s = (low * high) ** 0.5
            taken_s = step_s(self._draw(client, 1))
            if abs(taken_s / wanted_s - 1) < 0.01:
                break
            low, high = (throttle.bytes_per_s, high) if taken_s > wanted_s else (low, throttle.bytes_per_s)

    def _draw(self, client: Client, seed: int, **options: Any) -> Picture:
        return client.generate(PROMPT, **self._drawing(seed), **options)

    def _watched(self, client: Client, seed: int) -> tuple[Picture, float]:
        """Return a picture, and the seconds of a step in the middle of all, by the times at which ends are reported."""
        ends: list[tuple[int, float]] = []
        for event in client.stream(PROMPT, **self._drawing(seed)):
            if isinstance(event, Progress):
                ends.append((event.steps_done, perf_counter()))
            elif isinstance(event, Completed):
                steps = [after - before for (one, before), (next_, after) in pairwise(ends) if next_ == one + 1]
                return event.images[0], median(steps)
        raise RuntimeError("the stream of events ended without a last one")

    def _drawing(self, seed: int) -> dict[str, Any]:
        return {
            "seed": seed,
            "num_inference_steps": self._options.steps,
            "guidance_scale": GUIDANCE_SCALE,
            "width": self._side,
            "height": self._side,
            "controlnets": [ControlNet("edges", self._image, controlnet_conditioning_scale=0.8)],
            "timeout_s": 600,
        }


def serial(*, model: str, net: str, side: int) -> Answer:
    """Make stock Diffusers with one ControlNet, one part after the other.

    It answers {"image", "seed", "steps"} with the seconds of a step, and {"rounds"} with those of each part of a guided
    step, alone.
    """
    stock = Stock(model)

    def answer(*, rounds: int = 0, image: str = "", seed: int = 0, steps: int = 0) -> Mapping[str, float]:
        if rounds:
            return measure_parts(stock.pipeline, net, side, rounds)
        return stock.draw(prompts=[PROMPT], seeds=[seed], steps=steps, size=side, nets=[net], images=[[image]])

    return answer


def _follow(folder: Path, count: int) -> Mapping[str, float]:
    """Return the shares of pictures that show what the control image does, by mode; and the stale steps of one."""
    asked = cases("edges", count, things=1)
    with (
        Throttle() as throttle,
        _running(folder, "miniature", WEIGHTS / "controlnets" / "edges", relayed(throttle)) as client,
    ):
        client.set_controlnet_profile("edges", similarity=1.0, num_inference_steps=1)
        exact = _draw_cases(client, asked, stale=False)
        throttle.bytes_per_s = FOLLOW_BYTES_PER_S
        _draw_cases(client, (asked * _LINK_WARM_UPS)[:_LINK_WARM_UPS], stale=True)  # measures the link
        stale = _draw_cases(client, asked, stale=True)
    return {
        "follow_cases": len(asked),
        "follow_synchronous": _share(asked, exact, stale=False),
        "follow_pipelined": _share(asked, stale, stale=True),
        "follow_stale_steps": mean(picture.provenance.controlnets[0].stale_steps for picture in stale),
    }


def _draw_cases(client: Client, asked: Sequence[Case], *, stale: bool) -> list[Picture]:
    """Draw case i with seed i."""

    def one(seed: int, case: Case) -> Picture:
        image = io.BytesIO()
        case.control.save(image, "PNG")
        return client.generate(
            caption(case.prompted),
            seed=seed,
            num_inference_steps=miniature.STEPS,
            guidance_scale=miniature.GUIDANCE,
            controlnets=[ControlNet("edges", image.getvalue())],
            stale_residuals=stale,
            timeout_s=600,
        )

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(one, range(len(asked)), asked))


def _share(asked: Sequence[Case], pictures: Sequence[Picture], *, stale: bool) -> float:
    """Return the share of pictures that follow. Raises RuntimeError where some were drawn in the other mode."""
    other = sum(bool(picture.provenance.controlnets[0].stale_steps) != stale for picture in pictures)
    if other:
        raise RuntimeError(f"{other} of {len(pictures)} pictures were not drawn in the mode that was meant")
    drawn = [
        miniature.Drawn(scene=case.shown, picture=picture.pil().convert("RGB"))
        for case, picture in zip(asked, pictures, strict=True)
    ]
    return mean(one.right for one in drawn)


def _fill(sheet: Sheet, values: Mapping[str, float], options: argparse.Namespace) -> None:
    encoder_s, decoder_s, controlnet_s = ((values[name] + values[f"{name}_again"]) / 2 for name in PARTS)
    speedup = values["serial_step_s"] / values["suite_step_s"]
    ideal = values["serial_step_s"] / (max(encoder_s, controlnet_s) + decoder_s)
    sheet.values |= {
        f"{name.removesuffix('_s')}_ms": value * 1e3
        for name, value in values.items()
        if name.endswith("_s") and not name.endswith("_per_s")
    }
    # As the ideal has them: not what was measured before everything else alone.
    of_unet = options.topology == "sdxl"
    half = "encoder half" if of_unet else "transformer"
    sheet.figure(f"{half} alone", encoder_s * 1e3, "{:.0f} ms", key="encoder_ms", bar="100 ms or more")
    sheet.figure("ControlNet alone", controlnet_s * 1e3, "{:.0f} ms", key="controlnet_ms")
    if of_unet:
        sheet.figure("decoder half alone", decoder_s * 1e3, "{:.0f} ms", key="decoder_ms")
    sheet.row("a step, serial Diffusers on one core", f"{values['serial_step_s'] * 1e3:.0f} ms")
    sheet.row("a step, suite on two", f"{values['suite_step_s'] * 1e3:.0f} ms")
    sheet.figure("serial over suite", speedup, "{:.3f}", key="speedup")
    sheet.figure("serial over the parts side by side", ideal, "{:.3f}", key="ideal")
    bar = "at least 0.95" if of_unet else "at least 0.93"
    sheet.figure("of the ideal", speedup / ideal, "{:.3f}", key="achieved_over_ideal", bar=bar)
    sheet.row(f"{half}, both cores computing", f"{values['encoder_beside_s'] * 1e3:.0f} ms")
    sheet.row("ControlNet, both cores computing", f"{values['controlnet_beside_s'] * 1e3:.0f} ms")
    beside_s = max(values["encoder_beside_s"], values["controlnet_beside_s"]) + decoder_s
    what, key = "of the ideal of these", "achieved_over_ideal_beside"
    sheet.figure(what, beside_s / values["suite_step_s"], "{:.3f}", key=key)
    if "pipelined_step_s" in values:
        synchronous_s = values["synchronous_step_s"]
        gain = synchronous_s / values["pipelined_step_s"]
        # A pipelined step waits for nothing, but the UNet itself is left.
        most = synchronous_s / (encoder_s + decoder_s)
        sheet.figure("slow link", values["slow_bytes_per_s"] / 1e6, "{:.1f} MB/s", key="slow_mb_per_s")
        slow, bar = values["serial_step_s"] / synchronous_s, f"about {options.slow_gain}"
        sheet.figure("serial over synchronous there", slow, "{:.3f}", key="slow_speedup", bar=bar)
        what, bar = "synchronous over pipelined", "at least 1.2"
        sheet.figure(what, gain, "{:.3f}", key="pipelined_over_sync", bar=bar)
        sheet.figure("synchronous over the UNet alone", most, "{:.3f}", key="pipelined_ideal")
        sheet.figure("of the ideal", gain / most, "{:.3f}", key="pipelined_achieved_over_ideal")
        form = f"{{:g}} of {options.steps}"
        sheet.figure("stale steps of a picture", values["stale_steps"], form, key="stale_steps")
    if "follow_pipelined" in values:
        lost = 100 * (values["follow_synchronous"] - values["follow_pipelined"])
        sheet.values |= {name: value for name, value in values.items() if name.startswith("follow_")}
        sheet.row("pictures that follow, exact steps", f"{values['follow_synchronous']:.2f}")
        sheet.row("  steps that go on with those before", f"{values['follow_pipelined']:.2f}")
        sheet.figure("  points lost", lost, "{:.1f}", key="follow_lost_points", bar="at most 3")


if __name__ == "__main__":
    sys.exit(BENCH.command())
