"""Shares and shapes of a day of a picture service. Some stand as TOML in mixes/."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field

from bottega import config
from bottega.errors import ConfigError
from bottega.strict import STRICT
from load.replay.arrivals import ArrivalShape
from load.replay.prompt_stream import Share, StreamShape
from load.replay.trace_shape import TEMPLATES

MIXES = Path(__file__).parent / "mixes"


def _with_something(weights: Mapping[object, float]) -> Mapping[object, float]:
    if not any(weights.values()):
        raise ValueError("one of the weights must be above 0")
    return weights


def _all_different(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("a name may be there once")
    return names


DataSet = Literal["production", "public", "try-on"]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
StepCount = Annotated[int, Field(ge=1, le=200)]
StepWeights = Annotated[Mapping[StepCount, Weight], AfterValidator(_with_something)]
MaskWeights = Annotated[Mapping[DataSet, Weight], AfterValidator(_with_something)]
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], AfterValidator(_all_different)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawShape:
    """Requests that are no edits."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    steps: StepWeights = field(default_factory=lambda: {20: 1.0, 30: 1.0, 50: 1.0})
    """Weights of step counts."""
    identical: Share = 0.05
    """Share that repeats one of the newest draws, seed and all, as when a page is loaded again.

    No paper has a figure.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class EditShape:
    """Edits."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    share: Share = 0.7
    """Share of all requests."""
    steps: StepWeights = field(default_factory=lambda: {20: 1.0})
    """Weights of step counts."""
    templates: Annotated[int, Field(ge=1, le=100_000)] = TEMPLATES
    """Images that are edited; a session edits one."""
    exponent: Annotated[float, Field(ge=0, le=10)] = 1.0
    """Of their popularity by rank (see TemplatePopularity)."""
    masks: MaskWeights = field(default_factory=lambda: {"production": 1.0})
    """Weights of the data sets whose masks are as large (see MaskRatios)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShape:
    """ControlNets, or LoRAs."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    service: Literal["A", "B"] = "B"
    """Service of the trace, whose requests have as many and as popular ones (see trace_shape)."""
    names: Names = ()
    """Names from the most popular one on. Those of the trace beyond them are left out; without names none is used."""
    of_draws: Share = 1.0
    """Share of the draws that follow the trace; the others use none."""
    of_edits: Share = 0.0
    """Share of the edits that follow the trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """A run."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    minutes: Positive = 20.0
    """Its length."""
    rate_per_s: Positive = 2.0
    """Requests a second on average, over all of it."""
    arrivals: ArrivalShape = field(default_factory=ArrivalShape)
    prompts: StreamShape = field(default_factory=StreamShape)
    draws: DrawShape = field(default_factory=DrawShape)
    edits: EditShape = field(default_factory=EditShape)
    controlnets: AdapterShape = field(default_factory=AdapterShape)
    loras: AdapterShape = field(default_factory=AdapterShape)

    @property
    def length_s(self) -> float:
        """Length in seconds."""
        return 60.0 * self.minutes


def load_mix(name: str, overrides: Mapping[str, object] = MappingProxyType({})) -> Mix:
    """Return a mix by its name in mixes/, or by the path of a TOML file; a trace that it names lies beside it.

    Args:
        name: The name or the path.
        overrides: Keys of the file that count instead of its own, in sections as there; None takes a key away.

    Raises ConfigError with the file and what in it is wrong.
    """
    path = Path(name) if name.endswith(".toml") else MIXES / f"{name}.toml"
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = ", ".join(sorted(each.stem for each in MIXES.glob("*.toml")))
        raise ConfigError(f"there is no mix {name}: give one of {known}, or the path of a .toml file") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    mix = config.parse(Mix, _merged(values, overrides), source=str(path))
    if mix.arrivals.trace is None:
        return mix
    return replace(mix, arrivals=replace(mix.arrivals, trace=path.parent / mix.arrivals.trace))


def _merged(values: Mapping[str, object], overrides: Mapping[str, object]) -> dict[str, object]:
    merged = dict(values)
    for key, value in overrides.items():
        inner = merged.get(key)
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            merged[key] = _merged(inner if isinstance(inner, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged
