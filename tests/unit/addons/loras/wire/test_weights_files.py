"""Which files of a folder are a LoRA: as PEFT and Diffusers lay them out; what could be two LoRAs is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from bottega.addons.loras.wire.weights_files import find_weights
from bottega.errors import BadLora

_PEFT = ("adapter_model.safetensors", "adapter_config.json")
_DIFFUSERS = "pytorch_lora_weights.safetensors"


def _written(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (_PEFT, [(*_PEFT, None)]),
        ((_DIFFUSERS, "optimizer.safetensors", "random_states_0.safetensors"), [(_DIFFUSERS, None, None)]),
        (("ink.safetensors", "README.md"), [("ink.safetensors", None, None)]),
        (("ink.safetensors", _PEFT[1]), [("ink.safetensors", _PEFT[1], None)]),
        (
            tuple(f"{component}/{name}" for component in ("unet", "text_encoder") for name in _PEFT),
            [
                (f"{component}/{_PEFT[0]}", f"{component}/{_PEFT[1]}", component)
                for component in ("text_encoder", "unet")
            ],
        ),
        ((_DIFFUSERS, "unet/config.json", "text_encoder/model.safetensors"), [(_DIFFUSERS, None, None)]),
    ],
    ids=str,
)
def test_a_folder_of_a_layout_is_found(
    tmp_path: Path, names: tuple[str, ...], found: list[tuple[str, str | None, str | None]]
) -> None:
    folder = _written(tmp_path, *names)
    assert [(file.path, file.config, file.component) for file in find_weights(folder)] == [
        (folder / path, folder / config if config else None, component) for path, config, component in found
    ]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("adapter_model.bin",), "holds none of adapter_model.safetensors"),
        ((*_PEFT, _DIFFUSERS), r"holds several LoRAs \(adapter_model.safetensors, pytorch_lora_weights.safetensors\)"),
        (("a.safetensors", "b.safetensors"), r"holds several LoRAs \(a.safetensors, b.safetensors\): name the file"),
        (
            (*_PEFT, "text_encoder/adapter_model.safetensors", "text_encoder/adapter_config.json"),
            "beside text_encoder/",
        ),
        (
            (_DIFFUSERS, "unet/adapter_model.safetensors", "unet/adapter_config.json"),
            f"holds {_DIFFUSERS} beside unet/",
        ),
        ((_PEFT[0],), "has no adapter_config.json beside it, which says its alpha"),
        (("unet/adapter_model.safetensors",), "unet/adapter_model.safetensors has no adapter_config.json"),
        (("unet/adapter_config.json",), "unet holds no adapter_model.safetensors; pickled weights are never opened"),
    ],
    ids=str,
)
def test_a_folder_of_which_something_would_be_passed_over_is_refused(
    tmp_path: Path, names: tuple[str, ...], says: str
) -> None:
    with pytest.raises(BadLora, match=says):
        find_weights(_written(tmp_path, *names))


def test_beside_a_file_only_its_own_configuration_is_read(tmp_path: Path) -> None:
    _written(tmp_path, *_PEFT, "ink.safetensors")
    assert [file.config for file in find_weights(tmp_path / _PEFT[0])] == [tmp_path / _PEFT[1]]
    assert [file.config for file in find_weights(tmp_path / "ink.safetensors")] == [None]
