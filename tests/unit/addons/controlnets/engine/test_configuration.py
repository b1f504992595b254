"""Whatever an untrusted config.json says, nothing large is built of it, and the answer names the field."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from bottega.addons.controlnets.engine import ControlNetSource, check_weights, find_controlnet, load_controlnet
from bottega.errors import ControlNetUnusable, InvalidRequest
from bottega.model_files.controlnet_config import NetworkConfig, read_fields, read_network_config
from tests.samples import published_configs
from tests.samples.hostile_controlnets import CONFIG, HOSTILE, NO_JSON, REAL, changed, with_config

CPU = torch.device("cpu")
# Field, lowest and highest number that is taken. Some are taken only beside others: WITH has them.
BOUNDS: tuple[tuple[str, float, float], ...] = (
    ("in_channels", 1, 256),
    ("layers_per_block", 1, 16),
    ("cross_attention_dim", 1, 65_536),
    ("transformer_layers_per_block", 0, 64),
    ("attention_head_dim", 1, 1024),
    ("num_attention_heads", 1, 1024),
    ("addition_time_embed_dim", 1, 8192),
    ("projection_class_embeddings_input_dim", 1, 65_536),
    ("norm_num_groups", 1, 1024),
    ("norm_eps", 0, 1),
    ("mid_block_scale_factor", -1000, 1000),
    ("downsample_padding", 0, 1),
    ("freq_shift", 0, 1),
)
# Lists: their numbers' bounds, and of how many.
LISTS: tuple[tuple[str, int, int], ...] = (
    ("block_out_channels", 1, 8192),
    ("conditioning_embedding_out_channels", 1, 8192),
    ("transformer_layers_per_block", 0, 64),
    ("attention_head_dim", 1, 1024),
    ("num_attention_heads", 1, 1024),
)
WITH: dict[str, Any] = {
    "block_out_channels": [8192, 8192],
    "layers_per_block": 1,
    "addition_time_embed_dim": 1,
    "projection_class_embeddings_input_dim": 65_536,
    "attention_head_dim": 1,
}
_SPARE: dict[str, dict[str, Any]] = {
    "projection_class_embeddings_input_dim": {"addition_embed_type": None},
    "block_out_channels": {"norm_num_groups": 1},
}


def _text(field: str, value: Any) -> bytes:
    return json.dumps({**CONFIG, **WITH, **_SPARE.get(field, {}), field: value}).encode()


def _blamed(text: bytes) -> list[str]:
    with pytest.raises(InvalidRequest) as refusal:
        read_network_config(text)
    assert refusal.value.violations
    for violation in refusal.value.violations:
        assert violation.field == "folder"
        assert violation.description.isprintable()
        assert len(violation.description) < 300
    return [
        violation.description.removeprefix("config.json: ").partition(":")[0] for violation in refusal.value.violations
    ]


@pytest.mark.parametrize(("field", "low", "high"), BOUNDS)
def test_a_number_is_taken_at_its_bounds_and_refused_by_name_beyond(field: str, low: float, high: float) -> None:
    for value in (low, high):
        assert getattr(read_network_config(_text(field, value)), field) == value
    wrong: tuple[Any, ...] = (low - 1, high + 1, 10**18, -(10**18), 10**400, float("nan"), float("inf"), "1", [], {})
    for value in wrong:
        assert _blamed(_text(field, value)) == [field]


@pytest.mark.parametrize(("field", "low", "high"), LISTS)
def test_numbers_in_lists_have_the_same_bounds_and_lists_their_length(field: str, low: int, high: int) -> None:
    for value in (low, high):
        assert getattr(read_network_config(_text(field, [value, value])), field) == (value, value)
    wrong: tuple[Any, ...] = (low - 1, high + 1, 10**18, 10**400, "1", None, {})
    for value in wrong:
        assert _blamed(_text(field, [low, value])) == [f"{field}[1]"]
    assert _blamed(_text(field, [1] * 9)) == [field]
    assert _blamed(_text(field, [1] * 30_000)) == [field]


def test_every_number_that_a_network_is_built_from_has_a_case() -> None:
    numbers = {
        name
        for name, value in read_network_config(json.dumps(dict(CONFIG)).encode()).fields.items()
        if (isinstance(value, int | float) and not isinstance(value, bool))
        or (isinstance(value, tuple) and isinstance(value[0], int))
        or value is None
    }
    assert numbers - {"conditioning_channels"} == {name for name, *_ in (*BOUNDS, *LISTS)}  # that one is always 3


@pytest.mark.parametrize(("field", "value"), HOSTILE, ids=lambda value: ascii(value)[:30])
def test_what_would_take_gigabytes_is_refused_by_name(field: str, value: Any) -> None:
    assert _blamed(changed(field, value)) == [field]


@pytest.mark.parametrize("name", NO_JSON)
def test_what_is_no_configuration_is_refused(name: str) -> None:
    def read(text: bytes) -> None:
        read_fields(text)
        read_network_config(text)

    with pytest.raises(InvalidRequest, match=r"config\.json"):
        read(NO_JSON[name])


def test_layers_come_to_a_bounded_number_of_blocks() -> None:
    (field,) = _blamed(json.dumps({**CONFIG, "layers_per_block": 16, "transformer_layers_per_block": [8, 8]}).encode())
    assert field == "transformer_layers_per_block"


def test_lists_must_have_an_entry_for_each_level() -> None:
    for field, value in (("down_block_types", ["DownBlock2D"]), ("attention_head_dim", [2, 4, 4])):
        assert _blamed(changed(field, value)) == [field]
    assert _blamed(changed("attention_head_dim", [2, 97])) == ["attention_head_dim"]
    assert _blamed(changed("projection_class_embeddings_input_dim", 95)) == ["projection_class_embeddings_input_dim"]
    assert _blamed(changed("addition_time_embed_dim", None)) == ["addition_time_embed_dim"]


def test_sdxls_own_configuration_is_taken() -> None:
    config = read_network_config(json.dumps(published_configs.controlnet()).encode())
    assert isinstance(config, NetworkConfig)
    assert config.pooled_width == 1280


_JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([10**10, 10**6, 65]),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)
_LIKELY = (
    st.integers(-1, 70)
    | st.lists(st.integers(0, 12), max_size=4)
    | st.lists(st.sampled_from([8, 16, 48, 96]), max_size=4)
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.dictionaries(st.sampled_from(sorted({*CONFIG, "num_attention_heads"})), _JUNK | _LIKELY, min_size=1, max_size=3)
)
def test_a_mutated_configuration_is_one_of_a_network_or_an_error_of_its_folder(
    mutated: Path, changes: dict[str, Any]
) -> None:
    (mutated / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    try:
        check_weights(_found(mutated))
    except (InvalidRequest, ControlNetUnusable) as error:
        assert error.message.isprintable()  # noqa: PT017 - either is right
        assert len(error.message) < 1500  # noqa: PT017


@pytest.fixture(scope="module")
def mutated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(REAL, tmp_path_factory.mktemp("mutated") / "net"))


def _found(folder: Path, root: Path | None = None) -> ControlNetSource:
    return find_controlnet("net", folder, base=None, dtype=torch.float32, root=root)


def test_weights_that_are_not_what_the_configuration_builds_are_refused_before_they_are_read(tmp_path: Path) -> None:
    cases = {
        "other shapes": ({"cross_attention_dim": 64}, r"is \[96, 128\] and should be \[96, 64\]"),
        "more": ({"layers_per_block": 1}, "nothing takes "),
        "fewer": ({"layers_per_block": 3}, "is not there"),
    }
    for name, (changes, said) in cases.items():
        folder = with_config(tmp_path / name, json.dumps({**CONFIG, **changes}).encode())
        with pytest.raises(ControlNetUnusable, match=rf"not those of its config\.json: .*{said}"):
            check_weights(_found(folder))


def test_elements_that_are_no_floating_point_numbers_are_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(REAL, tmp_path / "net"))
    tensors = load_file(folder / "diffusion_pytorch_model.safetensors")
    tensors["conv_in.bias"] = tensors["conv_in.bias"].to(torch.int8)
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors")
    with pytest.raises(ControlNetUnusable, match="elements of I8"):
        _found(folder)


@pytest.mark.parametrize("file", ["config.json", "diffusion_pytorch_model.safetensors"])
def test_a_link_that_takes_a_files_place_after_it_was_found_is_not_read(tmp_path: Path, file: str) -> None:
    root = (tmp_path / "root").resolve()
    folder = Path(shutil.copytree(REAL, root / "net"))
    source = _found(folder, root)
    load_controlnet(source, CPU)
    (folder / file).rename(tmp_path / file)
    (folder / file).symlink_to(tmp_path / file)
    with pytest.raises(ControlNetUnusable, match=f"{file}: must be below .*, after links are resolved"):
        load_controlnet(source, CPU)
    with pytest.raises(ControlNetUnusable, match="after links are resolved"):
        _found(folder, root)
    load_controlnet(_found(folder), CPU)  # an operator's own may be links


def test_a_folder_that_grows_after_it_was_found_is_not_loaded(tmp_path: Path) -> None:
    """Else it would take more of the memory than it was counted for."""
    folder = Path(shutil.copytree(REAL, tmp_path / "net"))
    source = _found(folder)
    tensors = load_file(folder / "diffusion_pytorch_model.safetensors")
    tensors["more"] = torch.zeros(1000)
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors")
    with pytest.raises(ControlNetUnusable, match="its files have changed since they were checked; add it again"):
        load_controlnet(source, CPU)
