"""What a LoRA store says of its own work, beside a LoRA: as it was said, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from bottega.addons.loras.wire import messages
from bottega.addons.loras.wire.lora_files import find_weights
from bottega.errors import BadLora
from bottega.v1.trace_pb2 import StoreTimes

ALL = StoreTimes(**{field.name: 0.1 for field in StoreTimes.DESCRIPTOR.fields})


@pytest.mark.parametrize("times", [StoreTimes(), StoreTimes(read_s=0.5), ALL], ids=["none", "one", "all"])
def test_times_come_as_they_were_sent_and_all_messages_have_one_layout(times: StoreTimes) -> None:
    message = messages.whole_message(7, times)
    assert message.layout == messages.whole_message(8, StoreTimes()).layout
    assert messages.read_whole(message.layout, [memoryview(each) for each in message.buffers]) == (7, times)


@pytest.mark.parametrize("packed", [b"\x02\xff\xff", b"\xff" * 64, messages.pack_times(StoreTimes(read_s=-1.0))])
def test_what_are_no_times_is_refused(packed: bytes) -> None:
    with pytest.raises(ValueError, match=r"times|spent"):
        messages.read_times(memoryview(packed))


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
        ((_DIFFUSERS, "optimizer.safetensors", "unet/config.json"), [(_DIFFUSERS, None, None)]),
        (("ink.safetensors", "README.md"), [("ink.safetensors", None, None)]),
        (("ink.safetensors", _PEFT[1]), [("ink.safetensors", _PEFT[1], None)]),
        (
            tuple(f"{component}/{name}" for component in ("unet", "text_encoder") for name in _PEFT),
            [(*(f"{component}/{name}" for name in _PEFT), component) for component in ("text_encoder", "unet")],
        ),
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
        (("a.safetensors", "b.safetensors"), r"holds several LoRAs \(a.safetensors, b.safetensors\): name the file"),
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
