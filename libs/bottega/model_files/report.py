"""What the checker finds in a model's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bottega.model_files.presets import PRESET_FILE, Proposal, preset_text


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """One part of a model: a subfolder that model_index.json names."""

    name: str
    """Its subfolder, such as `unet`."""
    class_name: str
    """Its class in Diffusers or transformers, as model_index.json says."""
    config: Mapping[str, object] = field(default_factory=dict)
    """Its parsed configuration; empty where there is none or where it cannot be read."""
    variant: str = ""
    """The variant of its weights' files, such as `fp16`; empty for plain names."""
    files: tuple[Path, ...] = ()
    """Its files of weights: one, or every shard."""
    bytes_by_dtype: Mapping[str, int] = field(default_factory=dict)
    """Bytes of its weights by element type, as safetensors names it: F32, F16, BF16."""
    parameters: int = 0
    """Number of its weights."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its weights in its files."""
        return sum(self.bytes_by_dtype.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """What a folder is, and why it cannot be served, if so."""

    folder: Path
    family: str = ""
    """The kind of model for people, such as `SDXL` or `Stable Diffusion 1`; empty where it is not known."""
    pipeline_class: str = ""
    """`_class_name` of model_index.json."""
    parts: Mapping[str, PartReport] = field(default_factory=dict)
    """Its parts by name, those without weights included."""
    variant: str = ""
    """The variant of the weights, such as `fp16`, of all parts that have it; the others are loaded from plain ones."""
    default_size: int = 0
    """Pixels of a side of a picture where a request does not say; 0 where it is not known."""
    problems: tuple[str, ...] = ()
    """Why it cannot be served: one sentence each, which names a file or field and says what to do."""
    proposal: Proposal | None = None
    """Defaults that suit it, where it looks like a few-step model and its folder has no `bottega.json`."""

    @property
    def advice(self) -> str:
        """Return what would serve the model better, in one sentence; empty where nothing would."""
        if self.proposal is None:
            return ""
        path, content = self.folder / PRESET_FILE, preset_text(self.proposal.preset)
        advice = f"it looks like a few-step model; to make that its default, write {content} to {path}"
        if uncertain := self.proposal.uncertain:
            return f"{advice}, with the steps and guidance of its model card, because these are a guess: {uncertain}"
        return advice

    @property
    def refusal(self) -> str:
        """Why it cannot be served, in one sentence with its folder; empty where it can be."""
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
        """`_class_name` of the scheduler's configuration; empty where it is not known."""
        name = self.parts["scheduler"].config.get("_class_name") if "scheduler" in self.parts else None
        return name if isinstance(name, str) else ""
