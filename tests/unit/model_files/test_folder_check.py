"""What the checker says of model folders."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bottega.miniature import WEIGHTS
from bottega.model_files import weights
from bottega.model_files.folder_check import check_model_folder
from tests.samples.wrong_folders import (
    WRONG_FOLDERS,
    WrongFolder,
    change_json,
    link_model,
    replace,
    split_unet,
    tensors_of,
    write_vocabulary,
    write_zeros,
)

# Processor time for a folder; it takes some milliseconds.
LIMIT_S = 1.0


def test_the_embedded_model_can_be_served() -> None:
    report = check_model_folder(WEIGHTS)
    assert report.problems == ()
    assert report.refusal == ""
    assert (report.family, report.family_title, report.pipeline_class) == ("sdxl", "SDXL", "StableDiffusionXLPipeline")
    assert (report.default_size, report.scheduler_class, report.variant) == (64, "EulerDiscreteScheduler", "")
    assert {name: dict(part.bytes_by_dtype) for name, part in report.parts.items() if part.files} == {
        "text_encoder": {"F16": 289024},
        "text_encoder_2": {"F16": 297216},
        "unet": {"F16": 6717896},
        "vae": {"F16": 1363822},
    }
    assert report.size_bytes == sum(part.size_bytes for part in report.parts.values()) == 8667958
    assert report.parts["unet"].parameters == 3358948


@pytest.mark.parametrize("wrong", WRONG_FOLDERS, ids=lambda wrong: wrong.name)
def test_a_wrong_folder_is_refused_with_its_sentence(wrong: WrongFolder, tmp_path: Path) -> None:
    given, sentence = wrong.make_at(tmp_path / "model")
    began_s = time.thread_time()
    report = check_model_folder(given)
    assert time.thread_time() - began_s < LIMIT_S
    assert report.problems == (sentence,)
    assert report.refusal == f"the model {given} cannot be served: {sentence}"
    assert "\n" not in report.refusal


_INDEX = "unet/diffusion_pytorch_model.safetensors.index.json"
_TEXT = "text_encoder/model.safetensors"


def _repeat_a_shard(folder: Path) -> None:
    first, second = sorted((folder / "unet").glob("*-of-*"))
    write_zeros(second, tensors_of(first))


def _add_the_old_name(folder: Path) -> None:
    tensors = tensors_of(folder / _TEXT)
    name = next(iter(tensors))
    write_zeros(folder / _TEXT, tensors | {f"text_model.{name}": tensors[name]})


def _write_one_sided_merges(folder: Path) -> None:
    path = folder / "tokenizer" / "tokenizer.json"
    change_json(path, model=json.loads(path.read_bytes())["model"] | {"merges": [1]})


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (
            lambda folder: change_json(folder / _INDEX, weight_map=[]),
            f"{_INDEX}: weight_map is no object of tensors; download the file again",
        ),
        (
            lambda folder: change_json(folder / _INDEX, metadata=None),
            f"{_INDEX}: metadata is no object; download the file again",
        ),
        (
            lambda folder: change_json(
                folder / _INDEX, weight_map={str(number): f"{number}.safetensors" for number in range(257)}
            ),
            f"{_INDEX}: it names over 256 files; save the model in fewer shards",
        ),
        (
            _repeat_a_shard,
            f"{_INDEX}: two of its files have tensors of one name; download the part unet again",
        ),
        (
            _add_the_old_name,
            f"{_TEXT}: two tensors are loaded under one name; download the part text_encoder again",
        ),
        (
            lambda folder: replace(folder / "vae" / "config.json", "{" + " " * (1 << 20) + "}"),
            "vae/config.json: it has over 1048576 bytes, more than such a file can need; download the file again",
        ),
        (
            _write_one_sided_merges,
            "tokenizer/tokenizer.json: its merges are no pairs of tokens; download the file again",
        ),
    ],
)
def test_a_damaged_file_is_named_with_what_to_do(
    spoil: Callable[[Path], object], sentence: str, tmp_path: Path
) -> None:
    link_model(tmp_path / "model")
    split_unet(tmp_path / "model")
    assert check_model_folder(tmp_path / "model").problems == ()
    spoil(tmp_path / "model")
    assert check_model_folder(tmp_path / "model").problems == (sentence,)


def test_a_folder_of_very_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_MAX_FILES", 40)
    link_model(tmp_path / "model")
    assert check_model_folder(tmp_path / "model").problems == ()
    for number in range(40):
        (tmp_path / "model" / "unet" / str(number)).touch()
    sentence = "the folder unet has over 40 files; give the folder of a model alone"
    assert check_model_folder(tmp_path / "model").problems == (sentence,)


def test_further_problems_are_counted(tmp_path: Path) -> None:
    link_model(tmp_path / "model")
    change_json(tmp_path / "model" / "unet" / "config.json", act_fn="tanh", in_channels=True)
    report = check_model_folder(tmp_path / "model")
    assert len(report.problems) == 2
    assert report.refusal.endswith("(and 1 more problem)")


def test_a_snapshot_of_links_with_a_vocabulary_and_other_folders_can_be_served(tmp_path: Path) -> None:
    folder = tmp_path / "models--a--b" / "snapshots" / "0123"
    link_model(folder)
    for tokenizer in ("tokenizer", "tokenizer_2"):
        write_vocabulary(folder / tokenizer)
    for name in ("controlnets", "loras", "clip_vision"):
        (folder / name).symlink_to(WEIGHTS / name)
    (folder / "unet" / "LICENSE").write_text("a file that is no weights")
    assert check_model_folder(folder).problems == ()


def test_keys_that_diffusers_passes_over_and_null_values_can_be_served(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    link_model(folder)
    change_json(folder / "model_index.json", safety_checker=[None, None], _name_or_path="somewhere", later="a value")
    change_json(folder / "unet" / "config.json", _name_or_path="../checkpoint", upcast_attention=None, later={"a": 1})
    change_json(folder / "vae" / "config.json", _diffusers_version="0.19.0.dev0", latents_mean=None, later=[])
    change_json(folder / "text_encoder" / "config.json", _name_or_path="", torch_dtype="float16", later=1)
    assert check_model_folder(folder).problems == ()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
@pytest.mark.parametrize(
    ("closed", "sentence"),
    [
        (".", "the folder cannot be read"),
        ("unet", "unet/config.json: this user may not read it; change its permissions or its owner"),
        ("model_index.json", "model_index.json: this user may not read it; change its permissions or its owner"),
    ],
)
def test_what_this_user_may_not_read_is_named(closed: str, sentence: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    link_model(folder)
    change_json(folder / "model_index.json")
    (folder / closed).chmod(0)
    try:
        assert check_model_folder(folder).problems[0].startswith(sentence)
    finally:
        (folder / closed).chmod(0o700)


def test_a_few_step_model_without_a_preset_is_advised_one(tmp_path: Path) -> None:
    folder = tmp_path / "sdxl-lightning-8step"
    link_model(folder)
    change_json(folder / "scheduler" / "scheduler_config.json", timestep_spacing="trailing")
    advice = "it looks like a few-step model; to make that its default, write {} to {}"
    preset = '{"num_inference_steps": 8, "guidance_scale": 0.0}'
    assert check_model_folder(folder).advice == advice.format(preset, folder / "bottega.json")
    other = folder.rename(tmp_path / "my-turbo")
    assert "guidance of its model card, because these are a guess: its name says" in check_model_folder(other).advice
    (other / "bottega.json").write_text('{"num_inference_steps": 2, "guidance_scale": 0.0}')
    assert check_model_folder(other).advice == ""


@pytest.mark.parametrize("entry", [{"content": ["x"], "id": 1}, {"content": {}, "id": 1}, ["x"], None, 7])
def test_a_tokenizer_with_odd_added_tokens_is_checked_without_a_traceback(entry: object, tmp_path: Path) -> None:
    link_model(tmp_path / "model")
    path = tmp_path / "model" / "tokenizer" / "tokenizer.json"
    content = json.loads(path.read_bytes())
    content["added_tokens"].append(entry)
    path.unlink()
    path.write_text(json.dumps(content))
    assert all(problem.startswith("tokenizer/") for problem in check_model_folder(tmp_path / "model").problems)
