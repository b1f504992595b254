"""How strongly a module's product counts, where a file's trainer wrote it beside the tensors: alpha over rank.

PEFT writes its configuration into adapter_config.json, Diffusers the same fields into the file's metadata. Knows no
tensors. Source of the rules: PEFT's LoraConfig and its `get_pattern_key`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import pydantic
from pydantic import Field, TypeAdapter

from bottega.errors import BadLora
from bottega.lora.canonical import COMPONENTS

# Of Diffusers' metadata.
_METADATA = "lora_adapter_metadata"
_KEPT_OUT = ("pissa", "olora", "corda", "loftq", "lora_ga")
_Number = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """What counts of PEFT's configuration; it has many more fields."""

    lora_alpha: _Number | None = None
    alpha_pattern: dict[str, _Number] | None = None
    use_rslora: bool = False
    use_dora: bool = False
    peft_type: str | None = None
    init_lora_weights: bool | str | None = None

    def scale(self, path: str, rank: int) -> float:
        """Of the module at that path. Without an alpha it is 1."""
        alpha = self._alpha(path)
        if alpha is None:
            return 1.0
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def _alpha(self, path: str) -> float | None:
        for pattern, alpha in (self.alpha_pattern or {}).items():
            try:
                if re.match(rf"(.*\.)?({pattern})$", path):
                    return alpha
            except re.error as error:
                raise BadLora(f"alpha_pattern {pattern[:80]!r} is no regular expression: {error}") from None
        return self.lora_alpha


def read_adapter_config(text: bytes) -> AdapterConfig:
    """PEFT's adapter_config.json. Raises BadLora for what is none, or configures what is not served."""
    try:
        return _served(_ADAPTER.validate_json(text))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadLora(f"adapter_config.json cannot be used: {where}: {first['msg']}") from None


def from_metadata(metadata: Mapping[str, str]) -> dict[str, AdapterConfig]:
    """By component, what Diffusers wrote into the file's metadata. Raises BadLora where it cannot be used."""
    if _METADATA not in metadata:
        return {}
    try:
        fields: Any = json.loads(metadata[_METADATA])
        split = {component: _of(component, fields) for component in COMPONENTS}
        return {component: _served(_ADAPTER.validate_python(of)) for component, of in split.items() if of}
    except (ValueError, RecursionError, AttributeError) as error:
        raise BadLora(f"the file's {_METADATA} cannot be used: {str(error)[:200]}") from None


def _of(component: str, fields: Mapping[str, object]) -> dict[str, object]:
    prefix = f"{component}."
    return {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}


def _served(config: AdapterConfig) -> AdapterConfig:
    if config.peft_type not in {None, "LORA"}:
        raise BadLora(f"the adapter is {config.peft_type[:40] if config.peft_type else ''}, which is not served")
    if config.use_dora:
        raise BadLora("the file is DoRA, which is not served: its configuration says use_dora")
    kind = str(config.init_lora_weights or "").lower()
    if kind.startswith(_KEPT_OUT):
        raise BadLora(f"the adapter was begun by {kind[:40]}, which changes the base model's weights: not served")
    return config


_ADAPTER = TypeAdapter(AdapterConfig)
