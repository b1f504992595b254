"""The `bottega` command as people use it, against a gateway that follows a script."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import PIL.Image
import PIL.PngImagePlugin
import pytest
from google.protobuf import json_format

from bottega.errors import InvalidRequest, ModelNotFound, Violation
from bottega.v1 import generation_pb2
from tests.fakes.scripted_gateway import SMALL, ScriptedGateway, completed, image, progress, queued
from tests.support.processor_speed import on_this_machine, seconds_of_children
from tests.support.terminal import run

pytestmark = pytest.mark.usefixtures("own_folder")


def test_a_picture_is_drawn_and_said_where_it_is(gateway: ScriptedGateway, address: str, own_folder: Path) -> None:
    done = completed()
    for stage, seconds in (("denoise", 1.25), ("route", 0.0001), ("queue", 0.5)):
        done.completed.provenance.times.add(stage=stage, seconds=seconds)
    gateway.scripts = [[queued(2), progress(10), progress(20), done]]
    result = run("generate", "a big red star", "-o", "star.png", "--seed", "7", "--steps", "30", address=address)
    assert result.exit_code == 0
    assert (own_folder / "star.png").read_bytes().startswith(b"\x89PNG")
    assert "star.png  64x64  seed 7" in result.stdout
    assert result.stdout.endswith(" s (queue 0.500, denoise 1.250)\n")
    assert "queued, 2 before it, about 2 s" in result.stderr
    assert "step 10 of 30" in result.stderr
    assert "\x1b" not in result.output
    assert gateway.requests[0].spec.num_inference_steps == 30


def test_several_prompts_are_one_request_with_a_file_for_each(
    gateway: ScriptedGateway, address: str, own_folder: Path
) -> None:
    gateway.scripts = [[completed(image(0, SMALL), image(1, SMALL))], [completed(image(0, SMALL), image(1, SMALL))]]
    result = run("generate", "a star", "-p", "a ring", "--prompt", "a dot", "-o", "all.png", address=address)
    assert result.exit_code == 0, result.output
    assert list(gateway.requests[0].spec.prompts) == ["a star", "a ring", "a dot"]
    assert not gateway.requests[0].spec.prompt
    assert {"all-0.png", "all-1.png"} == {path.name for path in own_folder.iterdir()}
    assert run("generate", "a star", "-p", "a ring", address=address).exit_code == 0
    assert {"a-star-7.png", "a-ring-8.png"} <= {path.name for path in own_folder.iterdir()}
    both = run("generate", "a star", "-p", "a ring", "-n", "2", address=address)
    assert (both.exit_code, "--num-images is for a single prompt" in both.stderr) == (2, True)


def test_every_option_reaches_the_gateway(gateway: ScriptedGateway, address: str, own_folder: Path) -> None:
    (own_folder / "source.png").write_bytes(b"source")
    (own_folder / "edges.png").write_bytes(b"edges")
    gateway.scripts = [[completed()]]
    options = (
        "--negative-prompt= --guidance-scale=4.5 --guidance-rescale=0.5 --width=64 --height=128 --sampler=ddim --karras"
        " --image=source.png --strength=0.4 --prompt-2=two --negative-prompt-2=none --format=png --quality=70"
        " --fidelity=fast --model=miniature --control=edges=edges.png:0.8 --control=depth=source.png --stale-residuals"
        " --prompt-syntax=weighted --clip-skip=1 --no-exponential --beta --timestep-spacing=trailing"
        " --final-sigmas-type=sigma_min --timesteps=999,499,9 --sigmas=14.5,0.5,0 --true-cfg-scale=2.5 --step-caching"
        " --cfg-normalization=1.5 --cfg-truncation=0.75"
    )
    assert run("generate", "a star", *options.split(), address=address).exit_code == 0
    expected = generation_pb2.GenerationSpec(
        prompt="a star",
        prompt_2="two",
        negative_prompt="",
        negative_prompt_2="none",
        prompt_syntax=generation_pb2.PROMPT_SYNTAX_WEIGHTED,
        clip_skip=1,
        guidance_scale=4.5,
        guidance_rescale=0.5,
        true_cfg_scale=2.5,
        cfg_normalization=1.5,
        cfg_truncation=0.75,
        width=64,
        height=128,
        sampler=generation_pb2.SAMPLER_DDIM,
        use_karras_sigmas=True,
        use_exponential_sigmas=False,
        use_beta_sigmas=True,
        timestep_spacing=generation_pb2.TIMESTEP_SPACING_TRAILING,
        final_sigmas_type=generation_pb2.FINAL_SIGMAS_TYPE_SIGMA_MIN,
        timesteps=[999, 499, 9],
        sigmas=[14.5, 0.5, 0.0],
        image=b"source",
        strength=0.4,
        format=generation_pb2.IMAGE_FORMAT_PNG,
        quality=70,
        fidelity=generation_pb2.FIDELITY_FAST,
        model="miniature",
        controlnets=[_control("edges", b"edges", 0.8), _control("depth", b"source", None)],
        techniques=generation_pb2.Techniques(stale_residuals=True, step_caching=True),
    )
    assert gateway.requests[0].spec == expected


def _control(name: str, data: bytes, scale: float | None) -> generation_pb2.ControlNet:
    return generation_pb2.ControlNet(
        name=name,
        image=data,
        controlnet_conditioning_scale=scale,
        control_guidance_start=0.0,
        control_guidance_end=1.0,
        guess_mode=False,
    )


def test_a_control_that_cannot_be_is_said_to_be_so_before_anything_is_asked_for(
    gateway: ScriptedGateway, address: str, own_folder: Path
) -> None:
    (own_folder / "edges.png").write_bytes(b"edges")
    for value, said in (
        ("edges=", "'edges=': give NAME=FILE or NAME=FILE:SCALE, such as edges=edges.png:0.8"),
        ("ed:ges=edges.png", "'ges' is no control mode of a union"),
        ("../up=edges.png", "'../up' is no name of a ControlNet (letters, digits and . _ / + -)"),
        ("edges=nothing.png:high", "edges: there is no file nothing.png:high"),
        ("edges=.", "edges: . is a folder; give an image file"),
        ("edges=edges.png:0,8", "edges: '0,8' is no scale; give a number such as 0.8 after FILE:"),
        ("edges=edges.png:nan", "edges: 'nan' is no scale"),
    ):
        result = run("generate", "a star", "--control", value, address=address)
        assert result.exit_code == 2
        assert "--control" in result.stderr
        assert said in " ".join(result.stderr.split())
    assert not gateway.requests


def test_a_picture_that_had_controlnets_is_drawn_again_with_their_images_given(
    gateway: ScriptedGateway, address: str, own_folder: Path
) -> None:
    for name in ("edges", "depth"):
        (own_folder / f"{name}.png").write_bytes(name.encode())
    then = generation_pb2.ControlNet(
        name="edges", controlnet_conditioning_scale=0.4, control_guidance_start=0.1, control_guidance_end=0.9
    )
    spec = generation_pb2.GenerationSpec(prompt="a star", seed=7, controlnets=[then])
    _drawn(own_folder / "star.png", spec)
    missing = run("generate", "--like", "star.png", address=address)
    assert missing.exit_code == 2
    assert "--control edges=FILE" in " ".join(missing.stderr.split())
    gateway.scripts = [[completed()]]
    controls = ("--control", "depth=depth.png:2", "--control", "edges=edges.png")
    result = run("generate", "--like", "star.png", *controls, "-o", "b.png", address=address)
    assert result.exit_code == 0, result.output
    (request,) = gateway.requests
    then.image = b"edges"
    assert list(request.spec.controlnets) == [then, _control("depth", b"depth", 2.0)]


def _drawn(path: Path, spec: generation_pb2.GenerationSpec) -> None:
    info = PIL.PngImagePlugin.PngInfo()
    info.add_itxt("bottega", json_format.MessageToJson(spec))
    PIL.Image.new("RGB", (8, 8)).save(path, pnginfo=info)


def test_a_named_file_is_replaced_and_that_is_said(gateway: ScriptedGateway, address: str, own_folder: Path) -> None:
    (own_folder / "star.png").write_bytes(b"old")
    gateway.scripts = [[completed()]]
    result = run("generate", "a star", "-o", "star.png", address=address)
    assert "(replaced)" in result.stdout
    assert (own_folder / "star.png").read_bytes() != b"old"


def test_without_a_name_nothing_is_ever_replaced(gateway: ScriptedGateway, address: str, own_folder: Path) -> None:
    gateway.scripts = [[completed()], [completed()]]
    for _ in range(2):
        assert run("generate", "A big, red star!", address=address).exit_code == 0
    assert sorted(path.name for path in own_folder.glob("*.png")) == ["a-big-red-star-7-2.png", "a-big-red-star-7.png"]


def test_a_preview_is_rewritten_as_the_picture_grows(gateway: ScriptedGateway, address: str, own_folder: Path) -> None:
    early, late = progress(3), progress(9)
    early.progress.previews.add(index=0, jpeg=b"early")
    late.progress.previews.add(index=0, jpeg=b"late")
    gateway.scripts = [[early, late, completed()]]
    assert run("generate", "a star", "--preview", "look.jpg", address=address).exit_code == 0
    assert gateway.requests[0].preview
    assert (own_folder / "look.jpg").read_bytes() == b"late"


def _spec_like(*options: str, gateway: ScriptedGateway, address: str, **then: Any) -> generation_pb2.GenerationSpec:
    """Return the spec that `bottega generate --like` sends with these options, for a picture with these fields."""
    _drawn(Path("then.png"), generation_pb2.GenerationSpec(prompt="a star", **then))
    gateway.scripts = [[completed()]]
    drawn = run("generate", "--like", "then.png", *options, "-o", "now.png", address=address)
    assert drawn.exit_code == 0, drawn.output
    spec = gateway.requests[-1].spec
    spec.ClearField("prompt")
    spec.ClearField("format")
    return spec


def test_a_new_schedule_replaces_what_contradicts_it_of_an_earlier_picture(
    gateway: ScriptedGateway, address: str
) -> None:
    karras, trailing = {"use_karras_sigmas": True}, {"timestep_spacing": "TIMESTEP_SPACING_TRAILING"}
    cases: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
        ({"timesteps": [9, 5], "num_inference_steps": 2}, "--steps=50", {"num_inference_steps": 50}),
        ({"sigmas": [9, 0]}, "--timestep-spacing=trailing", trailing),
        ({"timesteps": [9, 5]}, "--karras", karras),
        (
            {"num_inference_steps": 30, "timestep_spacing": "TIMESTEP_SPACING_LEADING", **karras},
            "--timesteps=9,5",
            {"timesteps": [9, 5], "use_karras_sigmas": False},
        ),
        (karras, "--beta", {"use_karras_sigmas": False, "use_beta_sigmas": True}),
        (
            {"num_inference_steps": 30, **karras},
            "--no-beta --timestep-spacing=trailing",
            {"num_inference_steps": 30, "use_beta_sigmas": False, **karras, **trailing},
        ),
    ]
    for then, options, now in cases:
        spec = _spec_like(*options.split(), gateway=gateway, address=address, **then)
        assert spec == generation_pb2.GenerationSpec(**now), options


def test_a_suffix_that_is_no_format_of_ours_is_refused_with_those_that_are(
    gateway: ScriptedGateway, address: str, own_folder: Path
) -> None:
    result = run("generate", "a star", "-o", "star.gif", address=address)
    assert "star.gif: its name must end in .png, .jpg, .jpeg, .webp; try star.gif.png, for example." in result.stderr
    assert not list(own_folder.glob("star*"))
    jpeg = image(0, b"jpeg")
    jpeg.format = generation_pb2.IMAGE_FORMAT_JPEG
    gateway.scripts = [[completed()], [completed(jpeg)]]
    for name in ("star", "star.jpg"):
        assert run("generate", "a star", "-o", name, address=address).exit_code == 0
    assert {path.name for path in own_folder.glob("star*")} == {"star.png", "star.jpg"}
    assert gateway.requests[-1].spec.format == generation_pb2.IMAGE_FORMAT_JPEG


@pytest.mark.parametrize(
    ("arguments", "said", "cancelled"),
    [
        (["generate", "a star"], "error: interrupted; the job is cancelled\n", ["job-1"]),
        (["jobs", "watch", "job-1"], "error: interrupted; the job goes on\n", []),
    ],
)
def test_ctrl_c_cancels_the_job_of_the_command_and_no_other(
    gateway: ScriptedGateway, address: str, arguments: list[str], said: str, cancelled: list[str]
) -> None:
    gateway.scripts = [[queued(), threading.Event()]]
    command = [sys.executable, "-m", "bottega.client.cli", *arguments, "--address", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "queued" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 1
        assert process.stderr.read().startswith(said)
    assert gateway.cancelled == cancelled


def test_a_wrong_command_line_ends_with_status_2_before_anything_is_asked(
    gateway: ScriptedGateway, address: str
) -> None:
    for arguments in (
        "generate",
        "generate star --sampler dpm_sde",
        "generate star -o no/such/folder/star.png",
        "generate star -o star.jpg --format png",
        "generate star --preview look.png",
        "generate star --preview look.jpg --detach",
        "generate star -n 9",
        "generate star --timeout 0",
        "jobs --since 999999d",
        "jobs get",
        "jobs paint job-1",
        "paint",
    ):
        result = run(*arguments.split(), address=address)
        assert (result.exit_code, "Error:" in result.stderr) == (2, True), arguments
    assert [*gateway.requests, *gateway.submitted, *gateway.listed] == []


def test_an_error_says_what_happened_and_what_to_do(gateway: ScriptedGateway, address: str) -> None:
    violations = [
        Violation(field="spec.width", description="must be a multiple of 8"),
        Violation(field="spec.height", description="must be at most 2048"),
    ]
    wrong = InvalidRequest("2 fields break a rule", violations=violations)
    gateway.scripts = [[wrong], [ModelNotFound("no model sdxl; served: miniature")]]
    result = run("generate", "a star", address=address)
    assert result.exit_code == 2
    said = "error: this cannot be drawn\n  width: must be a multiple of 8\n  height: must be at most 2048\n"
    assert said in result.stderr
    result = run("generate", "a star", address=address)
    assert result.exit_code == 1
    assert "error: no model sdxl; served: miniature\n  bottega models lists what is served.\n" in result.stderr


def test_a_missing_gateway_is_said_with_the_command_that_starts_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bottega.client.cli.options._REACH_S", 0.3)
    result = run("models", address="127.0.0.1:1")
    assert result.exit_code == 1
    for said in ("bottega up", "systemctl start bottega-gateway", "no gateway answers at 127.0.0.1:1"):
        assert said in result.stderr


def test_logs_are_readable_and_raw_on_request(own_folder: Path) -> None:
    logs = own_folder / "state" / "logs"
    logs.mkdir(parents=True)
    line = {"time": "2026-01-01 10:00:01,123", "level": "ERROR", "service": "worker", "event": "engine lost", "code": 1}
    (logs / "worker-0.log").write_text(json.dumps({**line, "exc_info": "Traceback\n  here"}) + "\n")
    result = run("logs", "worker-0")
    assert result.stdout == "10:00:01,123 ERROR   worker-0     engine lost code=1\n    | Traceback\n    |   here\n"
    assert json.loads(run("logs", "--raw").stdout)["code"] == 1
    assert run("logs", "gateway").exit_code == 2
    (logs / "worker-0.log").unlink()
    nothing = run("logs", "worker-0")
    assert (nothing.exit_code, "bottega up" in nothing.stderr) == (1, True)
    assert "journalctl -u 'bottega-worker*' -n 20 -o cat" in nothing.stderr


def test_several_pictures_get_numbers(gateway: ScriptedGateway, address: str, own_folder: Path) -> None:
    gateway.scripts = [[completed(image(0, b"first"), image(1, b"second"))]]
    result = run("generate", "stars", "-n", "2", "-o", "star.png", address=address)
    assert [(own_folder / f"star-{n}.png").read_bytes() for n in range(2)] == [b"first", b"second"]
    assert result.exit_code == 0


def test_a_cut_prompt_is_said(gateway: ScriptedGateway, address: str) -> None:
    done = completed()
    done.completed.provenance.truncations.add(field="prompt", text="and so on")
    gateway.scripts = [[done]]
    assert "this part was ignored: and so on" in run("generate", "a star", address=address).stderr


@pytest.mark.alone
def test_help_is_quick_and_brings_no_torch() -> None:
    code = (
        "import sys\nfrom bottega.client.cli import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "heavy = {'torch', 'numpy', 'PIL', 'rich'} & set(sys.modules)\nassert not heavy, heavy"
    )
    for _ in range(3):  # what else runs on the machine makes some of them slower
        before_s = seconds_of_children()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
        took_s = seconds_of_children() - before_s
        assert done.returncode == 0, done.stderr
        assert "generate" in done.stdout
        if took_s < on_this_machine(0.5):
            return
    pytest.fail(f"each time it took longer, {took_s:.2f} s the last time")
