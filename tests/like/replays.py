"""Draws pictures again by their own parameters, as `--like` does, and compares them with the first ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import numpy as np

from bottega.client import Client, Picture, parameters_of
from bottega.client.types.options import GenerationOptions
from bottega.client.types.provenance import Parameters
from bottega.errors import BottegaError, CacheEntryGone, RecordingNotKept
from tests.like.requests import RandomRequest, RandomRequests
from tests.support.stock import pixels_of

TIMEOUT_S = 120.0
# What made a picture approximate where its provenance says nothing of it, and where others of its job are alone.
UNSTATED, OTHERS = "NO STATED CAUSE", "others of its job"
# Of what is drawn again: no value off by more, and no larger share of them off at all. Groups of another size sum in
# another order, so that latents differ by 1e-6 of their size: at most .15 % of the values were off in 1,600 pictures.
MOST_LEVELS, MOST_SHARE = 1, 2e-3
# A part that was cut out is resized when it is put back, by weights whose sums over two neighbours are above 1.
RESIZED_LEVELS = 2
# JPEG and WebP round blocks of 8 x 8: a value of a picture that is off by 1 moves its block by a quantization step.
LOSSY_LEVELS, LOSSY_SHARE = 24, 0.02


class Outcome(StrEnum):
    """What became of a picture that was asked for again."""

    EQUAL = "equal"
    """Every value is the same."""
    WITHIN = "within"
    """Within the tolerance for pictures that other groups of rows were computed in."""
    REFUSED = "refused"
    """Refused by a status that names what is gone."""
    DIFFERENT = "DIFFERENT"
    """Another picture, or refused for no stated reason: a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A picture and what became of it."""

    request: RandomRequest
    picture: Picture
    outcome: Outcome
    said: str = ""
    """What is wrong, or why it was refused."""

    @property
    def technique(self) -> str:
        """What made it approximate; empty for an exact picture."""
        made = self.picture.provenance
        if made.exact:
            return ""
        uses = {
            "recording": made.mask.recording,
            "cached start": any(start.image == self.picture.index for start in made.cached_starts),
            "late LoRAs": any(lora.from_step > made.begin_step for lora in made.loras),
            "stale residuals": any(use.stale_steps for use in made.controlnets),
            "tiled decoding": made.vae_tiled,
            "shared turns": made.shared_in_half_precision,
        }
        causes = [name for name, used in uses.items() if used]
        if not causes and made.cached_starts:  # of its job, others are approximate
            return OTHERS
        return ", ".join(causes) or UNSTATED


@dataclass(slots=True)
class Tally:
    """What became of all pictures."""

    replays: list[Replay] = field(default_factory=list)
    refused: list[tuple[RandomRequest, str]] = field(default_factory=list)
    """Requests that were not drawn at all, with the reason."""

    @property
    def faults(self) -> list[Replay]:
        """Pictures that are different, inexact ones that say of nothing why, and exact ones that were refused."""
        return [
            each
            for each in self.replays
            if each.outcome is Outcome.DIFFERENT
            or each.technique == UNSTATED
            or (each.outcome is Outcome.REFUSED and each.picture.provenance.exact)
        ]

    def table(self) -> Iterator[str]:
        """Return a line for each kind of request."""
        columns = ("pictures", "exact", *(outcome.value for outcome in Outcome))
        yield f"{'kind':28}" + "".join(f"{name:>11}" for name in columns) + "  approximate by"
        for kind in [*dict.fromkeys(each.request.kind for each in self.replays), "all"]:
            these = [each for each in self.replays if kind in (each.request.kind, "all")]
            outcomes = Counter(each.outcome for each in these)
            counts = (len(these), sum(each.picture.provenance.exact for each in these), *(outcomes[o] for o in Outcome))
            causes = Counter(each.technique for each in these if each.technique)
            said = ", ".join(f"{count} {name}" for name, count in causes.most_common())
            yield f"{kind:28}" + "".join(f"{count:>11}" for count in counts) + f"  {said}"
        lent = sum(each.picture.provenance.pair.steps > 0 for each in self.replays)
        yield f"{len(self.refused)} requests were refused; {lent} pictures had rows computed by a worker's peer"


def draw_and_replay(
    client: Client, requests: RandomRequests, count: int, folder: Path, *, at_once: int = 3, block: int = 15
) -> Tally:
    """Draw so many random requests, several at once, and each of their pictures again.

    Args:
        folder: Where pictures are saved, whose files say their parameters.
        block: Requests that are drawn before the pictures of any of them are drawn again.
    """
    tally = Tally()
    for request in requests.to_begin_with():
        _draw(client, request)
    with ThreadPoolExecutor(at_once) as pool:
        for first in range(0, count, block):
            made = [requests.make(number) for number in range(first, min(count, first + block))]
            drawn: list[tuple[RandomRequest, Picture]] = []
            for request, result in zip(made, pool.map(lambda one: _draw(client, one), made), strict=True):
                if isinstance(result, BottegaError):
                    tally.refused.append((request, f"{type(result).__name__}: {result.message}"))
                    continue
                drawn += [(request, picture) for picture in result]
                if request.options.get("keep_for_editing"):
                    requests.keep(result[0])
            tally.replays += pool.map(lambda each: replay(client, each[0], each[1], folder), drawn)
    return tally


def replay(client: Client, request: RandomRequest, picture: Picture, folder: Path) -> Replay:
    """Draw a picture again by its own parameters, its source, its mask and its control images given again."""
    result = Replay(request=request, picture=picture, outcome=Outcome.EQUAL)
    try:
        prompt, options = _parameters(request, picture, folder)
        again = client.generate(prompt, timeout_s=TIMEOUT_S, **options)
    except (RecordingNotKept, CacheEntryGone) as error:
        return replace(result, outcome=Outcome.REFUSED, said=error.message)
    except BottegaError as error:
        return replace(result, outcome=Outcome.DIFFERENT, said=f"{type(error).__name__}: {error.message}")
    exact = picture.provenance.exact or result.technique == OTHERS
    if again.provenance.exact != exact:
        return replace(result, outcome=Outcome.DIFFERENT, said=f"exact is {again.provenance.exact}, was {exact}")
    levels = RESIZED_LEVELS if "padding_mask_crop" in request.options else MOST_LEVELS
    return replace(result, **compare(picture, again, levels=levels))


def compare(picture: Picture, again: Picture, *, levels: int = MOST_LEVELS) -> dict[str, Any]:
    """Return the outcome for two pictures that should be the same, and what is wrong."""
    ours, other = pixels_of(again.pil()).astype(int), pixels_of(picture.pil()).astype(int)
    if ours.shape != other.shape:
        return {"outcome": Outcome.DIFFERENT, "said": f"sizes {ours.shape} and {other.shape}"}
    off = np.abs(ours - other)
    most, share = int(off.max()), float((off > 0).mean())
    if not most:
        return {"outcome": Outcome.EQUAL}
    lossless = picture.format == "png"
    allowed, allowed_share = (levels, MOST_SHARE) if lossless else (LOSSY_LEVELS, LOSSY_SHARE)
    outcome = Outcome.WITHIN if most <= allowed and share <= allowed_share else Outcome.DIFFERENT
    return {"outcome": outcome, "said": f"off by at most {most}, {share:.2%} of the values"}


def describe(replays: Sequence[Replay]) -> str:
    """Return what is known of these, for people who look for the fault."""
    lines = []
    for each in replays:
        made = each.picture.provenance
        lines.append(f"{each.request.kind}, picture {each.picture.index} of {each.request.num_images}: {each.said}")
        said = {name: value for name, value in each.request.options.items() if not isinstance(value, bytes)}
        lines.append(f"    asked: {each.request.prompt!r} {said}")
        lines.append(f"    exact {made.exact}, by {each.technique or 'nothing'}; {_short(made.parameters)}")
    return "\n".join(lines)


def _draw(client: Client, request: RandomRequest) -> tuple[Picture, ...] | BottegaError:
    options = cast("GenerationOptions", dict(request.options))
    try:
        return client.generate_many(request.prompt, request.num_images, timeout_s=TIMEOUT_S, **options)
    except BottegaError as error:
        return error


def _parameters(request: RandomRequest, picture: Picture, folder: Path) -> tuple[str, GenerationOptions]:
    """Return what draws the picture again: by its file, or by its provenance if it is a WebP."""
    if picture.format != "webp":
        prompt, options = parameters_of(picture.save(folder / f"{picture.job_id}-{picture.index}.{picture.format}"))
    else:
        alone = _alone(picture)
        prompt, options = alone.prompt, alone.options()
    said: dict[str, Any] = {**options, **request.inputs}
    nets = said.get("controlnets") or ()
    if nets:
        given = zip(nets, request.control_images, strict=True)
        said["controlnets"] = [replace(net, image=image) for net, image in given]
    return prompt, cast("GenerationOptions", said)


def _alone(picture: Picture) -> Parameters:
    """Return the parameters of one picture of a job, as Provenance.parameters says how."""
    made = picture.provenance
    parameters = replace(made.parameters, num_images=1, seed=picture.seed)
    if parameters.prompts:
        parameters = replace(parameters, prompt=parameters.prompts[picture.index], prompts=())
    if made.cached_starts and made.parameters.num_images > 1:
        own = [start.entry for start in made.cached_starts if start.image == picture.index]
        if own:
            return replace(parameters, cache_entry=own[0])
        return replace(parameters, approximate_cache=False)
    return parameters


def _short(parameters: Parameters) -> str:
    return str({"prompt": parameters.prompt, **parameters.options()})
