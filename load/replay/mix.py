"""What a day of a picture service is like: shares and shapes. Some stand as TOML in mixes/."""

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
from load.replay.template_popularity import TEMPLATES

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
    """Requests that are no edits. steps: weights of step counts. identical: share that is one of the newest draws once
    more, seed and all, as when somebody loads a page again; no paper says how many these are.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    steps: StepWeights = field(default_factory=lambda: {20: 1.0, 30: 1.0, 50: 1.0})
    identical: Share = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class EditShape:
    """Edits. share: of all requests. steps: weights of step counts. templates: images that are edited, one of them in a
    session; exponent: of their popularity by rank (see template_popularity). masks: weights of the data sets that masks
    are as large as (see mask_ratios).
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    share: Share = 0.7
    steps: StepWeights = field(default_factory=lambda: {20: 1.0})
    templates: Annotated[int, Field(ge=1, le=100_000)] = TEMPLATES
    exponent: Annotated[float, Field(ge=0, le=10)] = 1.0
    masks: MaskWeights = field(default_factory=lambda: {"production": 1.0})


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShape:
    """ControlNets, or LoRAs. service: of the trace, whose requests these have as many of and as popular ones as (see
    trace_shape). names: from the most popular one on; those of the trace beyond them are left out, and without names
    nobody uses any. of_draws, of_edits: share of those that follow the trace; the others use none.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    service: Literal["A", "B"] = "B"
    names: Names = ()
    of_draws: Share = 1.0
    of_edits: Share = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """A run. minutes: its length. rate_per_s: requests a second on average, over all of it."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    minutes: Positive = 20.0
    rate_per_s: Positive = 2.0
    arrivals: ArrivalShape = field(default_factory=ArrivalShape)
    prompts: StreamShape = field(default_factory=StreamShape)
    draws: DrawShape = field(default_factory=DrawShape)
    edits: EditShape = field(default_factory=EditShape)
    controlnets: AdapterShape = field(default_factory=AdapterShape)
    loras: AdapterShape = field(default_factory=AdapterShape)

    @property
    def length_s(self) -> float:
        """Of the run."""
        return 60.0 * self.minutes


def load_mix(name: str, overrides: Mapping[str, object] = MappingProxyType({})) -> Mix:
    """A mix by its name in mixes/, or by the path of a TOML file; a trace that it names lies beside it.

    overrides: keys of the file that count instead of its own, in sections as there; None takes a key away.
    Raises ConfigError naming the file, and what in it is wrong.
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
