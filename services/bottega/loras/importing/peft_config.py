r"""Reads PEFT's configuration of a LoRA: the alphas of its modules, and settings that are not supported.

PEFT writes its LoraConfig into adapter_config.json. Diffusers writes the same fields into a file's metadata; a pipeline
puts the component before each field's name, a network does not. A field that changes the computation is either applied
or refused by name. The modules and their ranks come from the tensors.

The keys of alpha_pattern and rank_pattern name modules. PEFT accepts any regular expression, but running an untrusted
one is dangerous. Accepted here are a module's name and what PEFT and its documentation write around it: `^` and `.*`
before the name, `$` behind it, escaped characters in it. They match as in PEFT, where a dot without a backslash stands
for any character.

Source: PEFT's LoraConfig, LoraModel._create_and_replace for the rules of alpha and rank, `get_pattern_key`, which
searches for (.*\.)?(KEY)$, and its use of `re.escape` to write names as keys.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import Field, StrictBool, TypeAdapter

from bottega.addons.loras.wire.module_parts import COMPONENTS
from bottega.errors import BadLora
from bottega.plain_text import excerpt

# Diffusers writes a key for each module whose alpha is not the most frequent one. SDXL's UNet has about 800 modules.
MAX_PATTERNS = 2048
MAX_CHARACTERS = 512
_SHOWN_CHARACTERS = 80

# Matches in linear time, because nothing in it can match in two ways.
_ACCEPTED = re.compile(r"(?P<begin>\^?)(?P<any>(?:\.\*)?)(?P<name>(?:[A-Za-z0-9_.-]|\\[.-])+)\$?")
_CHARACTERS = re.compile(r"\\?(.)")
_ANY = "."

_ValueT = TypeVar("_ValueT", int, float)

WHOLE_FILE = ""
"""Key of the configuration of a file whose metadata names no component."""

_ADAPTER_CONFIG = "adapter_config.json"
_METADATA = "lora_adapter_metadata"
# PEFT's default.
_DEFAULT_ALPHA = 8.0
_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
# PEFT refuses lower ones. LyCORIS' users state 100,000 where both factors of LoKr are to be whole.
_Rank = Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)]

# Fields that are read, see _Fields.
_COUNTED = frozenset(
    {
        "r",
        "alpha",
        "use_dora",
        "lora_alpha",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
        "bias",
        "peft_type",
        "init_lora_weights",
    }
)
# Fields that add more than a product of two factors to the weights, with a name of what they add.
_UNSERVED = MappingProxyType(
    {
        "use_qalora": "QALoRA",
        "use_bdlora": "BD-LoRA",
        "alora_invocation_tokens": "activation by tokens (aLoRA)",
        "arrow_config": "Arrow's routing",
        "kasa_config": "KaSA",
        "monteclora_config": "MonteCLoRA",
        "velora_config": "VeLoRA",
        "lora_bias": "biases of their own",
        "modules_to_save": "whole modules",
        "trainable_token_indices": "tokens of their own",
        "layer_replication": "repeated layers",
        "target_parameters": "parameters outside of modules",
        "megatron_config": "Megatron's layers",
    }
)
# Fields that do not change the computation: they are about training, or repeat what the tensors say. PEFT sets
# fan_in_fan_out to false for the kinds of layers that are supported.
_NEUTRAL = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "decompose_both",
        "decompose_factor",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_weights",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "module_dropout",
        "parent_library",
        "peft_version",
        "qalora_group_size",
        "rank_dropout",
        "rank_dropout_scale",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "use_effective_conv2d",
    }
)
_TYPES = ("LORA", "LOHA", "LOKR")
# Initialisations that change the base model's weights. PEFT writes True instead if it has converted the file.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """PEFT's configuration of one component, as far as it changes the computation."""

    where: str
    """Name of its source, for error texts."""
    lora_alpha: float
    use_rslora: bool
    alphas: tuple[tuple[str, ModulePattern, float], ...]
    """Keys of alpha_pattern, with their parsed patterns and alphas. The first key that matches a module applies."""
    rank: int | None
    """Rank of modules that no key of `ranks` matches; None if unknown."""
    ranks: tuple[tuple[str, ModulePattern, int], ...]
    use_dora: bool
    """Whether every module has magnitudes of DoRA."""
    peft_type: str | None

    def scale(self, path: str, rank: int) -> float:
        """Return the factor by which a module's product is multiplied.

        Args:
            path: Path of the module in the trainer's network.
            rank: Rank of the module's factors.
        """
        alpha = next((alpha for _, pattern, alpha in self.alphas if pattern.matches(path)), self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def check_rank(self, name: str, path: str, rank: int) -> None:
        """Raise BadLora if the rank of a module's factors differs from the configuration."""
        stated = self.stated_rank(path)
        if stated is not None and stated != rank:
            raise BadLora(
                f"{name} has rank {rank}, but {self.where} says {stated}: these files are not of the same adapter"
            )

    def stated_rank(self, path: str) -> int | None:
        """Return the rank of a module; None if it is unknown."""
        return next((stated for _, pattern, stated in self.ranks if pattern.matches(path)), self.rank)

    def check_used(self, paths: Iterable[str]) -> None:
        """Raise BadLora, which names the key, if a key of alpha_pattern matches no module of the component."""
        listed = list(paths)
        for key, pattern, _ in self.alphas:
            if not any(pattern.matches(path) for path in listed):
                raise BadLora(
                    f"{self.where} has an alpha_pattern '{excerpt(key, 80)}' that matches no module of the file"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fields:
    """PEFT's fields that change the computation."""

    r: _Rank | None = None
    lora_alpha: _Number = _DEFAULT_ALPHA
    rank_pattern: dict[str, _Rank] | None = None
    alpha_pattern: dict[str, _Number] | None = None
    alpha: _Number = _DEFAULT_ALPHA
    """Alpha of LoHa and LoKr."""
    use_rslora: StrictBool | None = False
    use_dora: StrictBool | None = False
    bias: str = "none"
    peft_type: str | None = None
    init_lora_weights: bool | str | None = None


def read_adapter_config(text: bytes) -> AdapterConfig:
    """Parse adapter_config.json. Raises BadLora if it is invalid or not supported."""
    return _served(_parsed(text, _ADAPTER_CONFIG), _ADAPTER_CONFIG)


def from_metadata(metadata: Mapping[str, str]) -> dict[str, AdapterConfig]:
    """Return the PEFT configurations that Diffusers wrote into a file's metadata, by component.

    The key is WHOLE_FILE if they name no component. Raises BadLora if they are invalid or not supported.
    """
    if _METADATA not in metadata:
        return {}
    where = f"the file's {_METADATA}"
    fields = _parsed(metadata[_METADATA], where)
    return {component: _served(values, where) for component, values in _by_component(fields, where).items()}


def _parsed(text: bytes | str, where: str) -> Any:
    try:
        return json.loads(text)
    except UnicodeDecodeError:
        reason = "it is not text in UTF-8"
    except json.JSONDecodeError as error:
        reason = f"it is not JSON: line {error.lineno}, column {error.colno}"
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError:
        reason = "it has a number with too many digits"
    raise BadLora(f"{where} cannot be used: {reason}")


def _by_component(fields: Any, where: str) -> dict[str, dict[str, object]]:
    split: dict[str, dict[str, object]] = {}
    for name, value in _checked(fields, where).items():
        component, dot, field = name.partition(".")
        if dot and component not in COMPONENTS:
            raise BadLora(f"{where} configures '{excerpt(component, 40)}', which is not a component of the base model")
        split.setdefault(component if dot else WHOLE_FILE, {})[field if dot else name] = value
    if WHOLE_FILE in split and len(split) > 1:
        bare = ", ".join(sorted(split[WHOLE_FILE])[:4])
        raise BadLora(f"{where} names a component for some fields but not for others: {excerpt(bare, 80)}")
    return split


def _checked(fields: Any, where: str) -> dict[str, object]:
    if not isinstance(fields, dict):
        raise BadLora(f"{where} cannot be used: it is not a JSON object")
    return fields


def _served(given: Any, where: str) -> AdapterConfig:
    values = _checked(given, where)
    for name, adds in _UNSERVED.items():
        if values.get(name):
            raise BadLora(f"{where} sets {name}: LoRAs with {adds} are not supported")
    try:
        fields = _FIELDS.validate_python({name: value for name, value in values.items() if name in _COUNTED})
    except pydantic.ValidationError as error:
        raise BadLora(f"{where} cannot be used: {_first(error)}") from None
    _check_kind(fields, where)
    for name, value in values.items():
        if value and name not in _COUNTED and name not in _NEUTRAL:
            raise BadLora(f"{where} sets '{excerpt(name, 40)}', which is unknown: it may change the picture")
    ranks = _known_ranks(fields)
    return AdapterConfig(
        where=where,
        lora_alpha=fields.lora_alpha if fields.peft_type in {None, "LORA"} else fields.alpha,
        use_rslora=bool(fields.use_rslora),
        use_dora=bool(fields.use_dora),
        peft_type=fields.peft_type,
        alphas=module_patterns("alpha_pattern", fields.alpha_pattern or {}),
        rank=fields.r if ranks is not None else None,
        ranks=ranks or (),
    )


def _check_kind(fields: _Fields, where: str) -> None:
    if fields.peft_type not in {None, *_TYPES}:
        served = ", ".join(_TYPES)
        raise BadLora(f"{where} says peft_type {excerpt(fields.peft_type or '', 40)}: only {served} are supported")
    if fields.bias != "none":
        raise BadLora(f"{where} says bias {excerpt(fields.bias, 40)}: LoRAs with trained biases are not supported")
    kind = str(fields.init_lora_weights or "").lower()
    if kind.startswith(_CHANGES_BASE):
        raise BadLora(
            f"{where} says init_lora_weights {excerpt(kind, 40)}, which changes the base model's weights: save the "
            "LoRA with PEFT's path_initial_model_for_weight_conversion"
        )


def _known_ranks(fields: _Fields) -> tuple[tuple[str, ModulePattern, int], ...] | None:
    """Return the ranks of rank_pattern, or None if a key is not accepted.

    The ranks are only used as a check: the tensors have the same ranks, or PEFT would not load them.
    """
    try:
        return module_patterns("rank_pattern", fields.rank_pattern or {})
    except BadLora:
        return None


def _first(error: pydantic.ValidationError) -> str:
    """Return the first problem, shortened because keys and values are untrusted."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return excerpt(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}", 200)


_FIELDS = TypeAdapter(_Fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePattern:
    """A parsed pattern of module paths. It matches a whole path, or the end of a path after a dot."""

    pieces: tuple[tuple[int, str], ...]
    """The literal parts of the name between wildcard characters, each with its offset in the name."""
    length: int
    """Number of characters of the name."""
    whole: bool
    """Whether the pattern matches whole paths only."""
    anywhere: bool
    """Whether any character may come before the name, not only a dot."""

    def matches(self, path: str) -> bool:
        """Return whether the pattern matches a module's path. This takes no longer than comparing two names."""
        before = len(path) - self.length
        if before < 0 or (before and self.whole):
            return False
        if before and not self.anywhere and path[before - 1] != ".":
            return False
        return all(path.startswith(piece, before + at) for at, piece in self.pieces)


def module_pattern(field: str, key: str) -> ModulePattern:
    """Parse a key of a field, such as rank_pattern, as a pattern of module paths.

    Raises BadLora for a key that is not accepted.
    """
    match = _ACCEPTED.fullmatch(key) if len(key) <= MAX_CHARACTERS else None
    if match is None:
        raise BadLora(
            f"{field} '{excerpt(key, _SHOWN_CHARACTERS)}' is not accepted: untrusted regular expressions are not run. "
            f"Write names of modules, of at most {MAX_CHARACTERS} characters; ^ or .* may be before a name, and $ "
            "behind it"
        )
    characters = [(found[0] == _ANY, found[1]) for found in _CHARACTERS.finditer(match["name"])]
    anywhere = bool(match["any"])
    return ModulePattern(
        pieces=tuple(_pieces(characters)),
        length=len(characters),
        whole=bool(match["begin"]) and not anywhere,
        anywhere=anywhere,
    )


def module_patterns(field: str, numbers: Mapping[str, _ValueT]) -> tuple[tuple[str, ModulePattern, _ValueT], ...]:
    """Return the keys of a field in their order, each with its parsed pattern and its number.

    Raises BadLora for a key that is not accepted, and for too many keys.
    """
    if len(numbers) > MAX_PATTERNS:
        raise BadLora(f"{field} has {len(numbers)} keys; at most {MAX_PATTERNS} are accepted")
    return tuple((key, module_pattern(field, key), number) for key, number in numbers.items())


def _pieces(characters: Iterable[tuple[bool, str]]) -> Iterator[tuple[int, str]]:
    """Yield the runs of literal characters between wildcards, each with its offset."""
    placed = enumerate(characters)
    for is_wildcard, run in groupby(placed, key=lambda item: item[1][0]):
        if not is_wildcard:
            piece = list(run)
            yield piece[0][0], "".join(character for _, (_, character) in piece)
