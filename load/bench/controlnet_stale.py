"""Whether pictures follow their control images as often with residuals one step old: the embedded model, in the suite.

The cases are those of controlnet_follow. The mode is chosen as it ever is, by a profile and a slow link, and every
picture's provenance has to say that it was the one meant.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

from bottega.client import Client, ControlNet, Picture
from bottega.miniature import WEIGHTS
from bottega.miniature.scenes import caption
from load.bench.controlnet_follow import Case, cases
from load.bench.controlnet_suite import Cast, relayed, suite
from load.bench.miniature import GUIDANCE_SCALE, STEPS, Drawn
from load.bench.throttle import Throttle

# A step's residuals take about three times as long as its encoder half then.
SLOW_BYTES_PER_S = 8e6
_AT_ONCE = 2
_WARM_UPS = 3


def follow(folder: Path, count: int) -> Mapping[str, float]:
    """The shares of `count` pictures that show what the control image does, by mode; and the stale steps of one."""
    asked = cases("edges", count, things=1)
    cast = Cast(folder=folder, model="miniature", net=WEIGHTS / "controlnets" / "edges")
    with Throttle() as throttle, suite(cast, "follow", relayed(throttle), {}) as client:
        client.set_controlnet_profile("edges", similarity=1.0, num_inference_steps=1)
        exact = _draw(client, asked, stale=False)
        throttle.bytes_per_s = SLOW_BYTES_PER_S
        _draw(client, asked[:_WARM_UPS], stale=True)  # measures the link
        stale = _draw(client, asked, stale=True)
    return {
        "follow_cases": len(asked),
        "follow_synchronous": _share(asked, exact, stale=False),
        "follow_pipelined": _share(asked, stale, stale=True),
        "follow_stale_steps": mean(picture.provenance.controlnets[0].stale_steps for picture in stale),
    }


def _draw(client: Client, asked: Sequence[Case], *, stale: bool) -> list[Picture]:
    """Case i with seed i."""

    def one(seed: int, case: Case) -> Picture:
        return client.generate(
            caption(case.prompted),
            seed=seed,
            num_inference_steps=STEPS,
            guidance_scale=GUIDANCE_SCALE,
            controlnets=[ControlNet("edges", _png(case))],
            stale_residuals=stale,
            timeout_s=600,
        )

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(one, range(len(asked)), asked))


def _share(asked: Sequence[Case], pictures: Sequence[Picture], *, stale: bool) -> float:
    """Raises RuntimeError where pictures were drawn in the other mode."""
    other = sum(bool(picture.provenance.controlnets[0].stale_steps) != stale for picture in pictures)
    if other:
        raise RuntimeError(f"{other} of {len(pictures)} pictures were not drawn in the mode that was meant")
    drawn = [
        Drawn(scene=case.shown, picture=picture.pil().convert("RGB"))
        for case, picture in zip(asked, pictures, strict=True)
    ]
    return mean(one.right for one in drawn)


def _png(case: Case) -> bytes:
    out = io.BytesIO()
    case.control.save(out, "PNG")
    return out.getvalue()
