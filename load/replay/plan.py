"""The requests of a mix.

Every kind of figure is drawn from a source of its own, so that request number n is the same at any rate and of any kind
of arrivals, and with more ControlNets the prompts stay what they were.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace

from bottega.errors import ConfigError
from load.replay.arrivals import arrival_times
from load.replay.mix import AdapterShape, DataSet, Mix
from load.replay.prompt_stream import stream
from load.replay.requests import Kind, PlannedRequest
from load.replay.trace_shape import CONTROLNETS, LORAS, TRACES, AdapterCalls, TemplatePopularity

MAX_REQUESTS = 1_000_000
# Of an identical request, how many of the newest draws it may be one of: somebody loads a page again, or tries a call
# again, within minutes.
_NEWEST_DRAWS = 50
_SEEDS = 1 << 31


def plan(mix: Mix, seed: int) -> list[PlannedRequest]:
    """Return all requests of a run, in order; the same ones for the same mix and seed.

    Raises ConfigError for a mix of which no requests come, too many, or some that cannot be made.
    """
    if mix.rate_per_s * mix.length_s > MAX_REQUESTS:
        raise ConfigError(f"{mix.rate_per_s:g} requests a second for {mix.minutes:g} minutes are over {MAX_REQUESTS:,}")
    chance = random.Random(f"{seed} arrivals")
    times = arrival_times(mix.arrivals, rate_per_s=mix.rate_per_s, length_s=mix.length_s, chance=chance)
    requests = _Requests(mix, seed)
    return [requests.next(at_s) for at_s in times]


class _Requests:
    """Requests one after the other, each for a given time."""

    def __init__(self, mix: Mix, seed: int) -> None:
        self._mix = mix
        self._kinds = random.Random(f"{seed} kinds")
        self._identical = random.Random(f"{seed} identical")
        self._draws, self._edits = _Stream(mix, seed, "draw"), _Stream(mix, seed, "edit")
        self._newest: deque[PlannedRequest] = deque(maxlen=_NEWEST_DRAWS)

    def next(self, at_s: float) -> PlannedRequest:
        """Return the next request."""
        if self._kinds.random() < self._mix.edits.share:
            return self._edits.next(at_s)
        drawn = self._draws.next(at_s)
        if self._identical.random() < self._mix.draws.identical and self._newest:
            drawn = replace(self._identical.choice(self._newest), at_s=at_s)
        self._newest.append(drawn)
        return drawn


class _Stream:
    """Requests of one kind: their sessions, and all that is drawn for each."""

    def __init__(self, mix: Mix, seed: int, kind: Kind) -> None:
        def chance(what: str) -> random.Random:
            return random.Random(f"{seed} {kind} {what}")

        edits = mix.edits
        self._kind: Kind = kind
        self._prompts = stream(mix.prompts, chance("prompts"))
        self._seeds = chance("seeds")
        self._steps = _steps(edits.steps if kind == "edit" else mix.draws.steps, chance("steps"))
        self._templates = TemplatePopularity(count=edits.templates, exponent=edits.exponent).draw(chance("templates"))
        self._template_of: dict[int, int] = {}
        self._masks = _mask_ratios(edits.masks, chance("masks"))
        self._controlnets = _adapters(mix.controlnets, CONTROLNETS, kind, chance("controlnets"))
        self._loras = _adapters(mix.loras, LORAS, kind, chance("loras"))

    def next(self, at_s: float) -> PlannedRequest:
        """Return the next request."""
        prompt = next(self._prompts)
        is_edit = self._kind == "edit"
        return PlannedRequest(
            at_s=at_s,
            kind=self._kind,
            prompt=prompt.prompt,
            seed=self._seeds.randrange(_SEEDS),
            steps=next(self._steps),
            template=self._template(prompt.session) if is_edit else None,
            mask_ratio=next(self._masks) if is_edit else None,
            controlnets=next(self._controlnets),
            loras=next(self._loras),
            # Sessions of draws and of edits are others.
            session=2 * prompt.session + is_edit,
        )

    def _template(self, session: int) -> int:
        """Return the template that the session edits."""
        if session not in self._template_of:
            self._template_of[session] = next(self._templates)
        return self._template_of[session]


def _steps(weights: Mapping[int, float], chance: random.Random) -> Iterator[int]:
    counts = sorted(weights)
    while True:
        yield from chance.choices(counts, [weights[count] for count in counts])


def _mask_ratios(weights: Mapping[DataSet, float], chance: random.Random) -> Iterator[float]:
    known = {ratios.name: ratios.draw(chance) for ratios in TRACES}
    names = sorted(weights)
    while True:
        (name,) = chance.choices(names, [weights[each] for each in names])
        yield next(known[name])


def _adapters(
    shape: AdapterShape, services: Mapping[str, AdapterCalls], kind: Kind, chance: random.Random
) -> Iterator[tuple[str, ...]]:
    """Yield the names of each request, without end. Raises ConfigError where the trace had fewer."""
    calls, names = services[shape.service], shape.names
    if len(names) > calls.unique:
        raise ConfigError(f"service {calls.name} of the trace had {calls.unique} of them; {len(names)} are named")
    ranks = calls.draw(chance, count=len(names), least=0) if names else None
    share = shape.of_edits if kind == "edit" else shape.of_draws
    while True:
        follows = chance.random() < share
        yield tuple(names[rank] for rank in next(ranks)) if ranks and follows else ()
