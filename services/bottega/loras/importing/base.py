"""The modules of a base model that LoRAs can change, with their shapes. Reads headers, not weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from bottega.addons.loras.wire.canonical import spellings
from bottega.addons.loras.wire.module_parts import COMPONENTS, TEXT_ENCODERS
from bottega.errors import BadLora, ConfigError
from bottega.loras.importing.original_names import flux_names, sd3_names, sgm_names, z_image_names
from bottega.model_files.family_names import FLUX, SD3, TRANSFORMER, UNET, Z_IMAGE, class_of
from bottega.model_files.field_rules import with_defaults
from bottega.model_files.transformer_rules import FLUX_RULES, SD3_RULES
from bottega.model_files.z_image_rules import Z_IMAGE_RULES
from bottega.safetensors_header import Header, read_header

# The layer that reads the latent, and after it the other inputs of some Flux.1 models: a mask and an image, or a
# control image.
_FLUX_INPUTS = "x_embedder"
_WEIGHT, _BIAS = ".weight", ".bias"
# Not supported: embedding tables are looked up by row instead of multiplied, so a LoRA cannot be added.
_TABLES = ("token_embedding", "position_embedding", "shared", "embed_tokens", "relative_attention_bias")
_TOKENS = "token_embedding.weight"
_SD3, _FLUX, _Z_IMAGE = (class_of(TRANSFORMER, family) for family in (SD3, FLUX, Z_IMAGE))
# Paths of T5's layers begin with this; paths of CLIP's layers do not.
_T5_BLOCKS = "encoder.block."


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Outputs of a module of the authors' code that are a separate module in Diffusers' network."""

    path: str
    rows: tuple[tuple[int, int], ...]
    """Ranges of outputs of the authors' module, in the order of the outputs of Diffusers' module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModule:
    """A linear layer, a convolution or a normalisation layer of a base model, in Diffusers' network or its authors'."""

    component: str
    path: str
    shape: tuple[int, ...]
    """Shape of its weight, [out, in] or [out, in, height, width]; [channels] of a normalisation layer."""
    has_bias: bool = False
    pieces: tuple[Piece, ...] = ()
    """The modules of Diffusers' network into which it is split; empty if it is one module there, too."""
    extends_latent: bool = False
    """Whether it reads a latent followed by other inputs, in which the models of a family differ."""

    @property
    def is_norm(self) -> bool:
        """Whether it is a normalisation layer."""
        return len(self.shape) == 1

    @property
    def name(self) -> str:
        """Component and path, for messages to users."""
        return f"{self.component}.{self.path}"


class Base:
    """The modules of a base model, found by the names that LoRA files use for them.

    Args:
        modules: The modules.
        denoiser: See the attribute.
        originals: Paths in the denoising network, by their names in the authors' code, with dots or with underscores
            in place of dots. If a name has several paths, the outputs of these modules follow each other.
        swapped: Paths of modules whose two halves of outputs are swapped in the authors' code.
        token_widths: See the attribute.
    """

    def __init__(
        self,
        modules: Iterable[BaseModule],
        *,
        denoiser: str = UNET,
        originals: Mapping[str, Sequence[str]],
        swapped: Sequence[str] = (),
        token_widths: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.denoiser = denoiser
        """Component of the denoising network."""
        self.token_widths = token_widths
        """Number of values that a token's vector has, for each text encoder of CLIP; empty if none reads embeddings."""
        self.t5 = TEXT_ENCODERS[-1]
        """Component of T5. If the model has no T5, it has no such component."""
        self._dotted: dict[tuple[str, str], BaseModule] = {}
        self._flat: dict[tuple[str, str], BaseModule | None] = {}
        for module in modules:
            if module.path.startswith(_T5_BLOCKS):
                self.t5 = module.component
            for path in spellings(module.component, module.path):
                self._dotted[module.component, path] = module
                flat = (module.component, path.replace(".", "_"))
                # If two modules have the same flat name, it is ambiguous and finds neither.
                self._flat[flat] = module if self._flat.get(flat, module) is module else None
        for name, paths in originals.items():
            parts = [found for path in paths if (found := self._dotted.get((denoiser, path))) is not None]
            if len(parts) == len(paths):
                whole = parts[0] if len(parts) == 1 and paths[0] not in swapped else _joined(name, parts, swapped)
                self._flat[denoiser, name.replace(".", "_")] = self._dotted[denoiser, name] = whole

    def find(self, component: str, path: str) -> BaseModule | None:
        """Return the module at a path with dots, or None."""
        return self._dotted.get((component, path))

    def find_flat(self, component: str, name: str) -> BaseModule | None:
        """Return the module at a path with underscores in place of dots, or None."""
        return self._flat.get((component, name))


def _joined(name: str, parts: Sequence[BaseModule], swapped: Sequence[str]) -> BaseModule:
    """Return the module of the authors' code whose outputs are those of the modules in `parts`, in this order."""
    pieces, end = list[Piece](), 0
    for part in parts:
        begin, end = end, end + part.shape[0]
        middle = (begin + end) // 2
        rows = ((middle, end), (begin, middle)) if part.path in swapped else ((begin, end),)
        pieces.append(Piece(path=part.path, rows=rows))
    return replace(parts[0], path=name, shape=(end, *parts[0].shape[1:]), pieces=tuple(pieces))


def read_base(folder: Path) -> Base:
    """Read the base model in a folder of Diffusers' layout. Raises ConfigError if the folder is not a model."""
    try:
        denoiser = TRANSFORMER if (folder / TRANSFORMER).is_dir() else UNET
        config = dict(json.loads((folder / denoiser / "config.json").read_text(encoding="utf-8")))
        widths = {
            component: entry.shape[1]
            for component, header in _headers(folder)
            for entry in header.tensors
            if entry.name.endswith(_TOKENS) and len(entry.shape) == 2
        }
        modules, originals, swapped = list(_modules(folder)), dict[str, Sequence[str]](), ["norm_out.linear"]
        if denoiser == UNET:
            originals = {name: (path,) for name, path in sgm_names(config).items()}
        elif config.get("_class_name") == _SD3:
            blocks = int(with_defaults(SD3_RULES, config)["num_layers"])
            originals, widths = sd3_names(blocks), {}
            swapped.append(f"transformer_blocks.{blocks - 1}.norm1_context.linear")
        elif config.get("_class_name") == _FLUX:
            filled = with_defaults(FLUX_RULES, config)
            originals, widths = flux_names(int(filled["num_layers"]), int(filled["num_single_layers"])), {}
            modules = [replace(module, extends_latent=module.path == _FLUX_INPUTS) for module in modules]
        elif config.get("_class_name") == _Z_IMAGE:
            filled = with_defaults(Z_IMAGE_RULES, config)
            originals, widths = z_image_names(int(filled["n_layers"]), int(filled["n_refiner_layers"])), {}
            # As in Diffusers, LoRAs change only the transformer, not the text encoder.
            modules = [module for module in modules if module.component == TRANSFORMER]
        return Base(modules, denoiser=denoiser, originals=originals, swapped=swapped, token_widths=widths)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, BadLora) as error:
        raise ConfigError(f"base model {folder} cannot be used: {error}") from None


def _modules(folder: Path) -> Iterator[BaseModule]:
    """Yield each module once. A component may have several files, or the same modules in several data types."""
    seen: set[tuple[str, str]] = set()
    headers = list(_headers(folder))
    tensors = {(component, entry.name) for component, header in headers for entry in header.tensors}
    for component, header in headers:
        for entry in header.tensors:
            module = entry.name.removesuffix(_WEIGHT)
            if module == entry.name or len(entry.shape) not in {1, 2, 4} or module.rpartition(".")[2] in _TABLES:
                continue
            has_bias = (component, f"{module}{_BIAS}") in tensors
            if len(entry.shape) == 1 and not has_bias:
                continue  # A norm of the root mean square, such as those of queries and keys. It cannot be changed.
            if any((component, path) in seen for path in spellings(component, module)):
                continue
            seen.add((component, module))
            yield BaseModule(component=component, path=module, shape=entry.shape, has_bias=has_bias)


def _headers(folder: Path) -> Iterator[tuple[str, Header]]:
    """Yield the headers of a model's files, each with its component."""
    for component in COMPONENTS:
        for path in sorted((folder / component).glob("*.safetensors")):
            with path.open("rb") as file:
                yield component, read_header(file)
