"""What untrusted callers may bring as ControlNets: folders of a real one with another configuration. Starts nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bottega.miniature import WEIGHTS

REAL = WEIGHTS / "controlnets" / "edges"
CONFIG: Mapping[str, Any] = json.loads((REAL / "config.json").read_text())

# Values that take gigabytes or hours of who builds something of them; by the field that is out of bounds.
HOSTILE: tuple[tuple[str, Any], ...] = (
    ("layers_per_block", 10**10),
    ("layers_per_block", 10**400),
    ("layers_per_block", [10**9, 10**9]),
    ("transformer_layers_per_block", 10**6),
    ("transformer_layers_per_block[0]", [10**6]),
    ("transformer_layers_per_block[1][0]", [1, [10**6]]),
    ("transformer_layers_per_block[0][0]", [[[1]]]),
    ("block_out_channels[1]", [48, 10**9]),
    ("block_out_channels", [48] * 1_000),
    ("conditioning_embedding_out_channels", [16] * 1_000),
    ("conditioning_embedding_out_channels[2]", [16, 24, 10**9]),
    ("down_block_types[0]", ["UpBlock2D", "DownBlock2D"]),
    ("down_block_types", ["DownBlock2D"] * 1_000),
    ("attention_head_dim[0]", [10**9, 4]),
    ("num_attention_heads", 10**9),
    ("cross_attention_dim", 10**12),
    ("in_channels", 10**9),
    ("in_channels", -1),
    ("in_channels", True),
    ("in_channels", "4"),
    ("addition_time_embed_dim", 10**9),
    ("projection_class_embeddings_input_dim", 10**12),
    ("norm_num_groups", 0),
    ("norm_eps", 1e308),
    ("downsample_padding", 10**9),
    ("freq_shift", 10**9),
    ("mid_block_scale_factor", -1e300),
    ("mid_block_type", "x" * 1_000),
    ("act_fn", "x" * 1_000),
    ("only_cross_attention", [True] * 1_000),
)
NO_JSON: Mapping[str, bytes] = {
    "nested deep": b"[" * 60_000,
    "nested deep in a field": b'{"block_out_channels": ' + b"[" * 60_000,
    "longer than any": b'{"a": "' + b"x" * (64 << 10) + b'"}',
    "cut": b'{"in_channels": ',
    "no object": b"[]",
    "no UTF-8": b'{"\xff": 1}',
    "a number of ten thousand digits": b'{"_class_name": "ControlNetModel", "in_channels": ' + b"9" * 10_000 + b"}",
}


_FILES = sorted(path.name for path in REAL.iterdir())
FOLDERS: Mapping[str, str] = {
    **{f"{field} wrong, {number}": f"hostile-{number}" for number, (field, _) in enumerate(HOSTILE)},
    **{f"a configuration {name}": f"junk-{number}" for number, name in enumerate(NO_JSON)},
    **{f"a link for {name}": f"link-{number}" for number, name in enumerate(_FILES)},
}
"""Names of folders that are refused, by what is wrong with them."""


def hostile_folders(root: Path) -> None:
    for number, (field, value) in enumerate(HOSTILE):
        with_config(root / f"hostile-{number}", changed(field, value))
    for number, text in enumerate(NO_JSON.values()):
        with_config(root / f"junk-{number}", text)
    for number, name in enumerate(_FILES):
        folder = Path(shutil.copytree(REAL, root / f"link-{number}"))
        (folder / name).unlink()
        (folder / name).symlink_to(REAL / name)


def with_config(folder: Path, text: bytes) -> Path:
    """The real one with another config.json."""
    shutil.copytree(REAL, folder)
    (folder / "config.json").write_bytes(text)
    return folder


def changed(field: str, value: Any) -> bytes:
    """The text of the real configuration with another value. field: may go on with places in it."""
    return json.dumps({**CONFIG, field.partition("[")[0]: value}).encode()
