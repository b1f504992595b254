"""What it gains to run a ControlNet on a server of its own: the suite with one ControlNet against serial Diffusers.

Worker and server have a core and a thread each, the reference has one; it runs the ControlNet first and then the UNet.
The ideal follows from the parts' own times: the ControlNet runs while the encoder half does. Beside it stands what is
left of it where both cores compute at once, as they share caches and memory. Then the same over TCP behind a relay that
is slowed down to where waiting for every step's residuals gains little, against steps that go on with those of the step
before; and how often the embedded model's pictures follow their control images then.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch
from diffusers import ControlNetModel, UNet2DConditionModel
from PIL import Image

from bottega.client import Client, Completed, ControlNet, Picture, Progress
from load.bench.bench_model import BenchShape, write_bench_model
from load.bench.controlnet_follow import CASES
from load.bench.controlnet_reference import ControlledReference
from load.bench.controlnet_stale import follow
from load.bench.controlnet_suite import Cast, pinned, relayed, suite
from load.bench.report import report
from load.bench.scratch import scratch
from load.bench.throttle import Throttle

# The encoder half of a guided step takes more than 100 ms with one thread.
SHAPE = BenchShape(block_out_channels=(64, 128, 256), transformer_layers=(1, 4), sample_size=32)
PROMPT = "a big red star on the left on a blue background"
GUIDANCE_SCALE = 5.0
WARM_UPS = 2
# Serial over suite, synchronous, on the slow link.
SLOW_GAIN = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What is drawn with. folder: for configurations and logs."""

    folder: Path
    model: Path
    net: Path
    image: Path
    steps: int
    requests: int

    @property
    def cast(self) -> Cast:
        """Whom to start."""
        return Cast(folder=self.folder, model=str(self.model), net=self.net)


def main() -> None:
    """Runs both comparisons and reports."""
    options = _options()
    with scratch() as folder:
        bench = _prepare(folder, options)
        with pinned(0):
            reference = ControlledReference(bench.model, bench.net)
        with reference:
            values = {**reference.parts(options.rounds), **_beside(bench, reference, options.rounds)}
            with suite(bench.cast, "memfd", {}, {}) as client:
                values |= _near(bench, reference, client)
            values |= _far(bench, values, options.slow_gain) if not options.only_near else {}
            values |= {f"{name}_again": seconds for name, seconds in reference.parts(options.rounds).items()}
        if options.cases and not options.only_near:
            values |= follow(folder, options.cases)
    _report(values, options)


def _beside(bench: Bench, reference: ControlledReference, rounds: int) -> dict[str, float]:
    """The parts again, while another process runs them on the other core."""
    with pinned(1):
        other = ControlledReference(bench.model, bench.net)
    with other, ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda each: each.parts(rounds), (reference, other)))
    return {f"{name.removesuffix('_s')}_beside_s": mean(parts[name] for parts in both) for name in both[0]}


def _near(bench: Bench, reference: ControlledReference, client: Client) -> dict[str, float]:
    """Serial and suite in turns, linked by shared memory."""
    serial, steps, ours = [], [], []
    for seed in range(WARM_UPS + bench.requests):
        plain = reference.step_s(
            image=bench.image, prompt=PROMPT, seed=seed, steps=bench.steps, guidance_scale=GUIDANCE_SCALE
        )
        picture, seconds = watched(bench, client, seed)
        if seed >= WARM_UPS:
            serial.append(plain)
            steps.append(seconds)
            ours.append(picture)
    return {
        "serial_step_s": median(serial),
        "suite_step_s": median(steps),
        "suite_mean_step_s": median(map(step_s, ours)),
        "suite_encoder_s": median(picture.provenance.encoder_s / bench.steps for picture in ours),
        "waited_s": median(picture.provenance.controlnets[0].waited_s / bench.steps for picture in ours),
    }


def _far(bench: Bench, near: Mapping[str, float], gain: float) -> dict[str, float]:
    """Synchronous and pipelined in turns, on one slow link."""
    with Throttle() as throttle, suite(bench.cast, "tcp", relayed(throttle), {}) as client:
        client.set_controlnet_profile("edges", similarity=1.0, num_inference_steps=1)
        draw(bench, client, 0)
        throttle.bytes_per_s = _slow(bench, client, throttle, near["serial_step_s"] / gain)
        synchronous, pipelined = [], []
        for seed in range(WARM_UPS + bench.requests):
            waiting = draw(bench, client, seed, stale_residuals=False)
            going_on = draw(bench, client, seed, stale_residuals=True)
            if seed >= WARM_UPS:
                synchronous.append(step_s(waiting))
                pipelined.append(going_on)
    return {
        "slow_bytes_per_s": throttle.bytes_per_s,
        "synchronous_step_s": median(synchronous),
        "pipelined_step_s": median(map(step_s, pipelined)),
        "stale_steps": median(picture.provenance.controlnets[0].stale_steps for picture in pipelined),
    }


def _slow(bench: Bench, client: Client, throttle: Throttle, wanted_s: float) -> float:
    """Bytes a second at which a synchronous step takes so long, found by trying."""
    low, high = 1e6, 1e9
    for _ in range(8):
        throttle.bytes_per_s = (low * high) ** 0.5
        taken_s = step_s(draw(bench, client, 1))
        if abs(taken_s / wanted_s - 1) < 0.01:
            break
        low, high = (throttle.bytes_per_s, high) if taken_s > wanted_s else (low, throttle.bytes_per_s)
    return throttle.bytes_per_s


def draw(bench: Bench, client: Client, seed: int, **options: Any) -> Picture:
    """One picture with the ControlNet."""
    return client.generate(PROMPT, **_drawing(bench, seed), **options)


def watched(bench: Bench, client: Client, seed: int) -> tuple[Picture, float]:
    """One picture, and the seconds of a step in the middle of all, from the end of one to that of the next as they are
    told: as the reference's."""
    ends: list[tuple[int, float]] = []
    for event in client.stream(PROMPT, **_drawing(bench, seed)):
        if isinstance(event, Progress):
            ends.append((event.steps_done, perf_counter()))
        elif isinstance(event, Completed):
            steps = [after_s - before_s for (one, before_s), (next_, after_s) in pairwise(ends) if next_ == one + 1]
            return event.images[0], median(steps)
    raise RuntimeError("the stream of events ended without a last one")


def _drawing(bench: Bench, seed: int) -> dict[str, Any]:
    return {
        "seed": seed,
        "num_inference_steps": bench.steps,
        "guidance_scale": GUIDANCE_SCALE,
        "controlnets": [ControlNet("edges", bench.image, controlnet_conditioning_scale=0.8)],
        "timeout_s": 600,
    }


def step_s(picture: Picture) -> float:
    """Seconds of a step in the mean, all that the engine does in it; the first one embeds the control image."""
    times = {spent.stage: spent.seconds for spent in picture.provenance.times}
    return (
        times["denoise"] + times["batch"] + times["controlnets"]
    ) / picture.provenance.parameters.num_inference_steps


def _prepare(folder: Path, options: argparse.Namespace) -> Bench:
    write_bench_model(folder / "model", SHAPE)
    unet = UNet2DConditionModel.from_pretrained(folder / "model" / "unet", use_safetensors=True)
    torch.manual_seed(1)
    net = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(16, 32, 64, 128))
    for convolution in (*net.controlnet_down_blocks, net.controlnet_mid_block):
        torch.nn.init.normal_(convolution.weight, std=0.01)
    net.save_pretrained(folder / "net", safe_serialization=True)
    side = SHAPE.sample_size * SHAPE.latent_scale
    Image.linear_gradient("L").resize((side, side)).convert("RGB").save(folder / "image.png")
    return Bench(
        folder=folder,
        model=folder / "model",
        net=folder / "net",
        image=folder / "image.png",
        steps=options.steps,
        requests=options.requests,
    )


def _report(values: Mapping[str, float], options: argparse.Namespace) -> None:
    encoder_s, decoder_s, controlnet_s = (
        (values[name] + values[f"{name}_again"]) / 2 for name in ("encoder_s", "decoder_s", "controlnet_s")
    )
    ideal_s = max(encoder_s, controlnet_s) + decoder_s
    speedup = values["serial_step_s"] / values["suite_step_s"]
    ideal = values["serial_step_s"] / ideal_s
    ideal_beside_s = max(values["encoder_beside_s"], values["controlnet_beside_s"]) + decoder_s
    achieved_beside = ideal_beside_s / values["suite_step_s"]
    figures = {
        "speedup": speedup,
        "ideal": ideal,
        "achieved_over_ideal": speedup / ideal,
        "achieved_over_ideal_beside": achieved_beside,
        **{f"{name.removesuffix('_s')}_ms": value * 1e3 for name, value in values.items() if _is_seconds(name)},
        # As the ideal has them: not what was measured before everything else alone.
        "encoder_ms": encoder_s * 1e3,
        "decoder_ms": decoder_s * 1e3,
        "controlnet_ms": controlnet_s * 1e3,
    }
    rows: list[Sequence[str]] = [
        ("encoder half alone", f"{encoder_s * 1e3:.0f} ms", "100 ms or more"),
        ("ControlNet alone", f"{controlnet_s * 1e3:.0f} ms", ""),
        ("decoder half alone", f"{decoder_s * 1e3:.0f} ms", ""),
        ("a step, serial Diffusers on one core", f"{values['serial_step_s'] * 1e3:.0f} ms", ""),
        ("a step, suite on two", f"{values['suite_step_s'] * 1e3:.0f} ms", ""),
        ("serial over suite (speedup)", f"{speedup:.3f}", ""),
        ("serial over the parts side by side (ideal)", f"{ideal:.3f}", ""),
        ("of the ideal (achieved_over_ideal)", f"{speedup / ideal:.3f}", "at least 0.95"),
        ("encoder half, both cores computing", f"{values['encoder_beside_s'] * 1e3:.0f} ms", ""),
        ("ControlNet, both cores computing", f"{values['controlnet_beside_s'] * 1e3:.0f} ms", ""),
        ("of the ideal of these (achieved_over_ideal_beside)", f"{achieved_beside:.3f}", ""),
    ]
    if "pipelined_step_s" in values:
        gain = values["synchronous_step_s"] / values["pipelined_step_s"]
        # A pipelined step waits for nothing, but the UNet itself is left.
        most = values["synchronous_step_s"] / (encoder_s + decoder_s)
        figures |= {
            "pipelined_over_sync": gain,
            "pipelined_ideal": most,
            "pipelined_achieved_over_ideal": gain / most,
            "slow_mb_per_s": values["slow_bytes_per_s"] / 1e6,
            "slow_speedup": values["serial_step_s"] / values["synchronous_step_s"],
            "stale_steps": values["stale_steps"],
        }
        rows += [
            ("slow link", f"{values['slow_bytes_per_s'] / 1e6:.1f} MB/s", ""),
            ("serial over synchronous there", f"{figures['slow_speedup']:.3f}", f"about {options.slow_gain}"),
            ("synchronous over pipelined (pipelined_over_sync)", f"{gain:.3f}", "at least 1.2"),
            ("synchronous over the UNet alone (pipelined_ideal)", f"{most:.3f}", ""),
            ("of the ideal (pipelined_achieved_over_ideal)", f"{gain / most:.3f}", ""),
            ("stale steps of a picture", f"{values['stale_steps']:g} of {options.steps}", ""),
        ]
    if "follow_pipelined" in values:
        lost = 100 * (values["follow_synchronous"] - values["follow_pipelined"])
        figures |= {name: value for name, value in values.items() if name.startswith("follow_")}
        figures["follow_lost_points"] = lost
        rows += [
            ("pictures that follow, exact steps", f"{values['follow_synchronous']:.2f}", ""),
            ("  steps that go on with those before", f"{values['follow_pipelined']:.2f}", ""),
            ("  points lost (follow_lost_points)", f"{lost:.1f}", "at most 3"),
        ]
    report("controlnet", [(row[0], row[1], row[2]) for row in rows], figures)


def _is_seconds(name: str) -> bool:
    return name.endswith("_s") and not name.endswith("_per_s")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=8, help="pictures on each side")
    parser.add_argument("--steps", type=int, default=12, help="of a picture")
    parser.add_argument("--rounds", type=int, default=15, help="of the parts alone")
    parser.add_argument("--cases", type=int, default=CASES, help="in which pictures shall follow; 0 leaves them out")
    parser.add_argument("--only-near", action="store_true", help="leave the slow link out")
    parser.add_argument(
        "--slow-gain", type=float, default=SLOW_GAIN, help="what waiting for every step gains on the slow link"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
