"""Converts an untrusted LoRA to canonical modules: every tensor must match the base model, or the LoRA is refused.

Definition of a LoRA (kohya, PEFT): W' = W + alpha / rank * up @ down, with an alpha for each module; `kinds` has the
others. A missing alpha equals the rank, except in PEFT's files, whose alpha is always in a separate configuration. A
file whose stated alpha would not be used is refused, because the LoRA's strength would be wrong.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from bottega.addons.loras.wire.canonical import MAX_IGNORED, ModuleWeights, headers_of_loras
from bottega.addons.loras.wire.lora_files import PEFT_CONFIG, LoraFile, find_weights
from bottega.addons.loras.wire.module_parts import COMPONENTS
from bottega.errors import BadLora
from bottega.loras.importing.base import Base
from bottega.loras.importing.kinds import ModuleParts, assemble
from bottega.loras.importing.naming import (
    Format,
    Name,
    Part,
    family_by_metadata,
    family_by_shapes,
    module_of,
    parse_name,
    refuse_two_ways,
    refuse_unserved,
    trained_path,
)
from bottega.loras.importing.peft_config import WHOLE_FILE, AdapterConfig, from_metadata, read_adapter_config
from bottega.plain_text import excerpt
from bottega.safetensors_header import Header, TensorEntry, read_header
from bottega.storage.folders import open_below

# Upper bound on PEFT's configuration. PEFT writes the names of all modules into it, some ten thousand bytes.
MAX_CONFIG_BYTES = 1 << 20
# Upper bound on the names in an error, which must fit into a gRPC status.
_MAX_LISTED_NAMES = 8
# Metadata keys in which trainers write the architecture for which a LoRA was made.
_MADE_FOR = ("modelspec.architecture", "ss_base_model_version")
_TRIGGERS = ("modelspec.trigger_phrase", "trigger_phrase")
_MAX_TRIGGER_CHARACTERS = 200
# kohya's trainer writes one alpha for all modules here, and also one .alpha for each module, which is used.
_KOHYA_ALPHA = "ss_network_alpha"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSourceFile:
    """A safetensors file of a LoRA that is imported."""

    path: Path
    root: Path | None = None
    """A resolved folder outside of which no file is opened, even through symlinks; None means no restriction."""
    config: AdapterConfig | None = None
    """PEFT's configuration from adapter_config.json; None if there is none."""
    component: str | None = None
    """The only component to which the file's tensors belong; None if unknown."""


def sources(
    path: Path, adapter_config: bytes = b"", component: str | None = None, *, root: Path | None = None
) -> list[LoraSourceFile]:
    """Return the LoRA files at a path.

    Args:
        path: A file, or a folder.
        adapter_config: PEFT's configuration of a file, if it is not beside the file; else b"".
        component: The only component to which the tensors of a file belong; None if unknown.
        root: A resolved folder outside of which no file is opened, even through symlinks; None means no restriction.

    Raises:
        BadLora: There is no LoRA at the path, or its configuration is not supported.
        OSError: A configuration cannot be read.
    """
    if adapter_config or component:
        config = read_adapter_config(adapter_config) if adapter_config else None
        return [LoraSourceFile(path=path, root=root, config=config, component=component)]
    return [
        LoraSourceFile(path=file.path, root=root, config=_config(file, root), component=file.component)
        for file in find_weights(path)
    ]


def _config(file: LoraFile, root: Path | None) -> AdapterConfig | None:
    if file.config is None:
        return None
    with open_below(file.config, root) as opened:
        text = opened.read(MAX_CONFIG_BYTES + 1)
    if len(text) > MAX_CONFIG_BYTES:
        raise BadLora(f"{PEFT_CONFIG} is over {MAX_CONFIG_BYTES} bytes")
    return read_adapter_config(text)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConvertedLora:
    """A LoRA as canonical modules."""

    modules: tuple[ModuleWeights, ...]
    format: Format
    trigger_phrase: str
    """The trigger phrase that the trainer wrote into the file, or ""."""
    note: str
    """A contradiction between its metadata and its shapes, in a sentence; "" without one."""
    token: str = ""
    """The token, if it is a textual inversion embedding."""
    ignored: tuple[str, ...] = ()
    """Layers of its files that match nothing in the base model."""


def convert(
    sources: Iterable[LoraSourceFile],
    *,
    base: Base,
    family: str = "",
    card: str = "",
    allow_partial: bool = False,
) -> ConvertedLora:
    """Convert the LoRA in some files to canonical modules. Raises BadLora, which names the problem, and OSError.

    Args:
        sources: The files.
        base: The base model.
        family: Display name of the base model's family; "" if unknown.
        card: The base model that the LoRA's model card names; "" if unknown. The file's metadata count for more.
        allow_partial: Whether layers that match nothing are ignored instead of refused. At least one layer must match.
    """
    with ExitStack() as stack:
        found: dict[str, ModuleParts] = {}
        headers = []
        ignored = list[str]()
        for source in sources:
            file = stack.enter_context(open_below(source.path, source.root))
            with headers_of_loras():
                headers.append(read_header(file))
            _collect(
                file,
                headers[-1],
                source,
                base=base,
                found=found,
                families=(family, card),
                ignored=ignored if allow_partial else None,
            )
        if not found:
            raise BadLora("nothing in the file matches the base model: it has no tensors")
        try:
            modules = tuple(chain.from_iterable(map(assemble, found.values())))
        except BadLora as error:
            shaped = family_by_shapes((entry, parse_name(entry.name)) for header in headers for entry in header.tensors)
            named = (family_by_metadata(header.metadata, card)[0] for header in headers)
            stated = next(filter(None, named), "")
            raise of_another_family(error.message, shaped or stated, family) from None
        _check_once(modules)
        return ConvertedLora(
            modules=modules,
            format=next(parts.format for parts in found.values()),
            trigger_phrase=_trigger(headers),
            note=_contradiction(headers, family, card),
            ignored=tuple(ignored),
        )


def _check_once(modules: Sequence[ModuleWeights]) -> None:
    """Raise BadLora if the file has two modules that change the same module of Diffusers' network."""
    for (component, path), count in Counter((module.component, module.path) for module in modules).items():
        if count > 1:
            raise BadLora(
                f"the file changes {component}.{path} twice, by different names: save it with one way of naming"
            )


def of_another_family(reason: str, family: str, base_family: str, *, what: str = "LoRA") -> BadLora:
    """Return the error for a LoRA or an embedding that does not fit, which names both families if they differ."""
    if not family or not base_family or family == base_family:
        return BadLora(reason)
    return BadLora(f"the {what} is for {family}, and the base model is {base_family}: {reason}")


def _contradiction(headers: Iterable[Header], base_family: str, card: str) -> str:
    for header in headers:
        family, value = family_by_metadata(header.metadata, card)
        if family and base_family and family != base_family:
            where = "metadata says" if family_by_metadata(header.metadata)[0] else "model card says"
            return (
                f"its {where} that it was made for {family} ({value}), but its layers fit {base_family}: "
                "the layers count"
            )
    return ""


def _collect(
    file: BinaryIO,
    header: Header,
    source: LoraSourceFile,
    *,
    base: Base,
    found: dict[str, ModuleParts],
    families: tuple[str, str],
    ignored: list[str] | None,
) -> None:
    """Add the tensors of a file to `found`, by module. Raises BadLora, which lists tensors without a module.

    `families` are the display name of the base model's family, and the base model that the model card names. If
    `ignored` is a list, it gets the layers without a module, unless no tensor of the file has one.
    """
    refuse_unserved([entry.name for entry in header.tensors])
    names = [(entry, parse_name(entry.name)) for entry in header.tensors]
    known = [(entry, name) for entry, name in names if name is not None]
    refuse_two_ways(name for _, name in known)
    component = source.component or _only_component(known, base)
    configs = _configs(source, header, [name for _, name in known])
    unmatched = []
    in_file: dict[str, ModuleParts] = {}
    for entry, name in names:
        module = module_of(name, base, component) if name is not None else None
        if name is None or module is None:
            unmatched.append(entry.name)
            continue
        collected = found.setdefault(
            module.name,
            ModuleParts(
                module=module,
                config=configs.get(module.component) or configs.get(WHOLE_FILE),
                format=name.format,
                path=trained_path(name, module),
            ),
        )
        in_file[module.name] = collected
        if name.part in collected.parts:
            raise BadLora(f"{entry.name} and {collected.parts[name.part][2].name} are the same part of {module.name}")
        collected.parts[name.part] = (file, header, entry)
    if unmatched and ignored is not None and in_file:
        ignored += dict.fromkeys(_layer(name) for name in unmatched)
        if len(ignored) > MAX_IGNORED:
            raise BadLora(
                f"{len(ignored)} layers match nothing in the base model; at most {MAX_IGNORED} can be ignored"
            )
    elif unmatched:
        family, card = families
        stated, _ = family_by_metadata(header.metadata, card)
        raise of_another_family(_unmatched(unmatched, header), family_by_shapes(names) or stated, family)
    _check_configs(configs, in_file.values())
    _check_kohya_alpha(header.metadata, in_file.values())


def _layer(tensor: str) -> str:
    """Return the layer of a tensor, as the file names it."""
    name = parse_name(tensor)
    if name is None:
        return excerpt(tensor, 120)
    return excerpt(tensor[: tensor.index(name.path) + len(name.path)] if name.path in tensor else tensor, 120)


def _only_component(known: Sequence[tuple[TensorEntry, Name]], base: Base) -> str | None:
    """Return the component to which a file without component names belongs; None if its names include the component.

    It is the component that has modules of these names and shapes. Raises BadLora if several have.
    """
    bare = [(entry, name) for entry, name in known if name.component is None]
    if not bare:
        return None
    lacking = {component: sum(module_of(name, base, component) is None for _, name in bare) for component in COMPONENTS}
    fewest = [component for component, count in lacking.items() if count == min(lacking.values())]
    fitting = [component for component in fewest if all(_fits(entry, name, base, component) for entry, name in bare)]
    if len(fitting) > 1:
        raise BadLora(
            f"the file may be for {' or '.join(fitting)}, and its names do not say which: put the component before "
            f"each name ({fitting[0]}.{excerpt(bare[0][1].path, 80)}), or upload a folder with PEFT's files in "
            f"{fitting[0]}/"
        )
    return (fitting or fewest)[0]


def _fits(entry: TensorEntry, name: Name, base: Base, component: str) -> bool:
    """Return whether a tensor's outer dimension matches the module of that name in a component."""
    module = module_of(name, base, component)
    if module is None or name.part is Part.ALPHA:
        return module is not None
    if len(entry.shape) == 1 or module.is_norm:  # magnitudes of DoRA, and differences of biases and norms
        return entry.shape[:1] == module.shape[:1]
    if len(entry.shape) < len(module.shape[:2]):
        return False
    match name.part:
        case Part.DOWN:
            return entry.shape[1] == module.shape[1]
        case Part.UP | Part.HADA_W1_A:
            return entry.shape[0] == module.shape[0]
    return True


def _configs(source: LoraSourceFile, header: Header, names: Sequence[Name]) -> Mapping[str, AdapterConfig]:
    """Return a file's PEFT configurations, by component. Raises BadLora if they do not match its tensors."""
    configs = from_metadata(header.metadata)
    if source.config is not None:
        if configs:
            raise BadLora("the file's metadata and adapter_config.json both state alphas: remove one of them")
        configs = {WHOLE_FILE: source.config}
    named = next((name for name in names if name.component is not None), None)
    if WHOLE_FILE in configs and named is not None:
        where = configs[WHOLE_FILE].where
        raise BadLora(f"{where} has no component names, but the file's tensor names have: {excerpt(named.text, 120)}")
    return configs


def _check_configs(configs: Mapping[str, AdapterConfig], found: Iterable[ModuleParts]) -> None:
    """Raise BadLora if an alpha belongs to no module of the file, or if a module has two."""
    modules = list(found)
    for component, config in configs.items():
        configured = [parts for parts in modules if parts.config is config]
        if not configured:
            about = component or "a component"
            raise BadLora(f"{config.where} configures {about}, but the file has no tensors for it")
        config.check_used(parts.path for parts in configured)
        for parts in configured:
            if Part.ALPHA in parts.parts:
                name = parts.parts[Part.ALPHA][2].name
                raise BadLora(f"{name} and {config.where} both state an alpha: remove one of them")


def _check_kohya_alpha(metadata: Mapping[str, str], found: Iterable[ModuleParts]) -> None:
    """Raise BadLora if only the metadata states an alpha that differs from the rank, because the rank would be used."""
    modules = [parts for parts in found if parts.format is Format.KOHYA]
    try:
        alpha = float(metadata.get(_KOHYA_ALPHA, "nan"))
    except ValueError:  # such as "Dynamic"
        return
    if math.isnan(alpha) or any(Part.ALPHA in parts.parts for parts in modules):
        return
    other = next((parts for parts in modules if parts.rank not in {None, alpha}), None)
    if other is not None:
        raise BadLora(
            f"the file's {_KOHYA_ALPHA} is {alpha:g} and the rank of {other.module.name} is {other.rank}, but no "
            "module has an .alpha: the LoRA's strength is unclear"
        )


def _trigger(headers: Iterable[Header]) -> str:
    for header in headers:
        metadata: Mapping[str, str] = header.metadata
        for key in _TRIGGERS:
            text = metadata.get(key, "").strip()
            if text and text.isprintable() and len(text) <= _MAX_TRIGGER_CHARACTERS:
                return text
    return ""


def _unmatched(names: Sequence[str], header: Header) -> str:
    listed = ", ".join(excerpt(name, 120) for name in names[:_MAX_LISTED_NAMES])
    more = f" and {len(names) - _MAX_LISTED_NAMES} more" if len(names) > _MAX_LISTED_NAMES else ""
    made_for = next((header.metadata[key] for key in _MADE_FOR if header.metadata.get(key)), "")
    hint = f"; its metadata says that it was made for {excerpt(made_for, 80)}" if made_for else ""
    tensors = len(header.tensors)
    if len(names) == tensors:
        return f"nothing in the file matches the base model; it has {listed}{more}{hint}"
    return f"{len(names)} of {tensors} tensors match nothing in the base model: {listed}{more}{hint}"
