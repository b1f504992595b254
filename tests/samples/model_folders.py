"""Copies of the small random model with another configuration; their weights are links to its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.samples.small_model import small_model


def with_scheduler(folder: Path, class_name: str, **config: Any) -> Path:
    """Write the small model with a scheduler of this class to a new folder.

    Args:
        folder: Where to write it; must not exist.
        class_name: The class of Diffusers that model_index.json and scheduler_config.json name.
        config: Keys of scheduler_config.json that differ from the small model's.

    Returns:
        The folder.
    """
    source = small_model()
    folder.mkdir(parents=True)
    for part in source.iterdir():
        if part.is_dir() and part.name != "scheduler":
            (folder / part.name).symlink_to(part)
    index = json.loads((source / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", class_name]
    (folder / "model_index.json").write_text(json.dumps(index))
    written = json.loads((source / "scheduler" / "scheduler_config.json").read_text()) | {"_class_name": class_name}
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(written | config))
    return folder
