"""The report of the checker on a model's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bottega.model_files.family_names import TITLES, denoiser_part
from bottega.model_files.presets import PRESET_FILE, Proposal, preset_text


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """A part of a model: a subfolder that model_index.json names."""

    name: str
    """Subfolder, such as `unet`."""
    folder: Path
    """Folder of its files: a subfolder of the model's, but for a VAE that replaces the model's own."""
    class_name: str
    """Class in Diffusers or transformers, from model_index.json."""
    config: Mapping[str, object] = field(default_factory=dict)
    """Parsed configuration; empty if it is missing or cannot be read."""
    variant: str = ""
    """Variant of its weight files, such as `fp16`; empty for plain names."""
    files: tuple[Path, ...] = ()
    """Weight files: a single one, or every shard."""
    bytes_by_dtype: Mapping[str, int] = field(default_factory=dict)
    """Bytes of its weights by safetensors' element type: F32, F16, BF16."""
    parameters: int = 0
    """Number of its weights."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its weights in its files."""
        return sum(self.bytes_by_dtype.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """A report on a model's folder, with the reasons why it cannot be served."""

    folder: Path
    family: str = ""
    """A key of `TITLES`, such as `sd15`, or the display name of a model that is not served; empty if unknown."""
    pipeline_class: str = ""
    """`_class_name` of model_index.json."""
    parts: Mapping[str, PartReport] = field(default_factory=dict)
    """Parts by name, including those without weights."""
    variant: str = ""
    """Variant of the weights, such as `fp16`. Parts without it are loaded from plain weights."""
    default_size: int = 0
    """Default side of a picture in pixels; 0 if it is unknown."""
    problems: tuple[str, ...] = ()
    """Reasons why it cannot be served: sentences that name a file or field, with advice."""
    proposal: Proposal | None = None
    """Suitable defaults, if it looks like a few-step model and its folder has no `bottega.json`."""

    @property
    def family_title(self) -> str:
        """Display name of the family, such as `SDXL` or `Stable Diffusion 1`; empty if unknown."""
        return TITLES.get(self.family, self.family)

    @property
    def denoiser(self) -> PartReport:
        """The denoising network of a model that can be served."""
        return self.parts[denoiser_part(self.family)]

    @property
    def edits_only(self) -> bool:
        """Whether its UNet reads a mask, so that it draws only edits."""
        config = self.parts["unet"].config if "unet" in self.parts else {}
        return config.get("in_channels", 4) != config.get("out_channels", 4)

    @property
    def advice(self) -> str:
        """A sentence on how to serve the model better; empty if there is none."""
        if self.proposal is None:
            return ""
        path, content = self.folder / PRESET_FILE, preset_text(self.proposal.preset)
        advice = f"it looks like a few-step model; to make that its default, write {content} to {path}"
        if uncertain := self.proposal.uncertain:
            return f"{advice}, with the steps and guidance of its model card, because these are a guess: {uncertain}"
        return advice

    @property
    def refusal(self) -> str:
        """A sentence with the folder on why it cannot be served; empty if it can be."""
        if not self.problems:
            return ""
        more = len(self.problems) - 1
        others = f" (and {more} more {'problem' if more == 1 else 'problems'})" if more else ""
        return f"the model {self.folder} cannot be served: {self.problems[0]}{others}"

    @property
    def size_bytes(self) -> int:
        """Bytes of all weights in their files."""
        return sum(part.size_bytes for part in self.parts.values())

    @property
    def scheduler_class(self) -> str:
        """`_class_name` of the scheduler's configuration; empty if it is unknown."""
        name = self.parts["scheduler"].config.get("_class_name") if "scheduler" in self.parts else None
        return name if isinstance(name, str) else ""
