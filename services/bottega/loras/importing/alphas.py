"""How strongly a module's product counts, where a file's trainer wrote it beside the tensors: alpha over rank.

PEFT writes its configuration into adapter_config.json, Diffusers the same fields into the file's metadata. Source of
the rules: PEFT's LoraConfig. Of its fields that may be regular expressions (target_modules,
exclude_modules, layers_pattern, rank_pattern, alpha_pattern) only the last is read, by patterns.py: what there is, and
of what rank, the tensors themselves say.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import pydantic
from pydantic import Field, TypeAdapter

from bottega.errors import BadLora
from bottega.lora.canonical import COMPONENTS
from bottega.loras.importing.patterns import ModulePattern, module_patterns
from bottega.plain_text import excerpt

# Of Diffusers' metadata.
_METADATA = "lora_adapter_metadata"
_KEPT_OUT = ("pissa", "olora", "corda", "loftq", "lora_ga")
_Number = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """What counts of PEFT's configuration. patterns: alphas by the modules that they are of; the first one counts."""

    lora_alpha: float | None
    use_rslora: bool
    patterns: tuple[tuple[ModulePattern, float], ...]

    def scale(self, path: str, rank: int) -> float:
        """Of the module at that path. Without an alpha it is 1."""
        alpha = next((alpha for pattern, alpha in self.patterns if pattern.matches(path)), self.lora_alpha)
        if alpha is None:
            return 1.0
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fields:
    """As PEFT writes them; it has many more."""

    lora_alpha: _Number | None = None
    alpha_pattern: dict[str, _Number] | None = None
    use_rslora: bool = False
    use_dora: bool = False
    peft_type: str | None = None
    init_lora_weights: bool | str | None = None


def read_adapter_config(text: bytes) -> AdapterConfig:
    """PEFT's adapter_config.json. Raises BadLora for what is none, or configures what is not served."""
    try:
        return _served(_FIELDS.validate_json(text))
    except pydantic.ValidationError as error:
        raise BadLora(f"adapter_config.json cannot be used: {_first(error)}") from None


def from_metadata(metadata: Mapping[str, str]) -> dict[str, AdapterConfig]:
    """By component, what Diffusers wrote into the file's metadata. Raises BadLora where it cannot be used."""
    if _METADATA not in metadata:
        return {}
    try:
        fields: Any = json.loads(metadata[_METADATA])
        split = {component: _of(component, fields) for component in COMPONENTS}
        return {component: _served(_FIELDS.validate_python(of)) for component, of in split.items() if of}
    except pydantic.ValidationError as error:
        raise BadLora(f"the file's {_METADATA} cannot be used: {_first(error)}") from None
    except (ValueError, RecursionError, AttributeError) as error:
        raise BadLora(f"the file's {_METADATA} cannot be used: {excerpt(str(error), 200)}") from None


def _of(component: str, fields: Mapping[str, object]) -> dict[str, object]:
    prefix = f"{component}."
    return {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}


def _served(fields: _Fields) -> AdapterConfig:
    if fields.peft_type not in {None, "LORA"}:
        raise BadLora(f"the adapter is {excerpt(fields.peft_type or '', 40)}, which is not served")
    if fields.use_dora:
        raise BadLora("the file is DoRA, which is not served: its configuration says use_dora")
    kind = str(fields.init_lora_weights or "").lower()
    if kind.startswith(_KEPT_OUT):
        raise BadLora(
            f"the adapter was begun by {excerpt(kind, 40)}, which changes the base model's weights: not served"
        )
    alphas = fields.alpha_pattern or {}
    patterns = tuple(zip(module_patterns(alphas), alphas.values(), strict=True))
    return AdapterConfig(lora_alpha=fields.lora_alpha, use_rslora=fields.use_rslora, patterns=patterns)


def _first(error: pydantic.ValidationError) -> str:
    """What is wrong first, short: keys and values are untrusted."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return excerpt(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}", 200)


_FIELDS = TypeAdapter(_Fields)
