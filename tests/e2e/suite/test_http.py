"""The HTTP API in front of a whole suite: OpenAI's own client, unchanged, and the commands of the page."""

from __future__ import annotations

import base64
import io
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import PIL.Image
import pytest
from openai import OpenAI

from bottega.client import Client, parameters_of
from bottega.errors import InvalidRequest
from tests.support.services import Service

_PROMPT = "a big red star on the left on a blue background"
_PAGE = Path(__file__).resolve().parents[3] / "services/bottega/http/README.md"
_OWN = {"seed": 7, "num_inference_steps": 6}

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")


@pytest.fixture(scope="module")
def caller(http: Service) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://{http.address}/v1", api_key="none", timeout=60.0) as caller:
        yield caller


def _image(text: str | None) -> PIL.Image.Image:
    image = PIL.Image.open(io.BytesIO(base64.b64decode(text or "")))
    image.load()
    return image


def test_a_picture_over_http_is_that_of_grpc(caller: OpenAI, client: Client) -> None:
    own = {"seed": 7, "timesteps": [999, 599, 299, 99]}
    answer = caller.images.generate(prompt=_PROMPT, extra_body={"bottega": own})
    assert answer.data
    picture = client.generate(_PROMPT, seed=7, timesteps=(999, 599, 299, 99))
    assert base64.b64decode(answer.data[0].b64_json or "") == picture.data


@pytest.mark.parametrize(("output_format", "metadata"), [("jpeg", True), ("webp", True), ("png", False)])
def test_a_picture_comes_in_the_format_and_with_the_metadata_that_were_asked_for(
    caller: OpenAI, tmp_path: Path, output_format: Literal["jpeg", "webp", "png"], metadata: bool
) -> None:
    answer = caller.images.generate(
        prompt=_PROMPT, output_format=output_format, extra_body={"bottega": {**_OWN, "metadata": metadata}}
    )
    assert answer.data
    image = _image(answer.data[0].b64_json)
    assert image.format == output_format.upper()
    path = tmp_path / "picture"
    path.write_bytes(base64.b64decode(answer.data[0].b64_json or ""))
    if metadata:
        prompt, options = parameters_of(path)
        assert (prompt, options.get("seed"), options.get("format")) == (_PROMPT, 7, output_format)
    else:
        assert not image.info.keys() & {"bottega", "parameters", "exif"}
        with pytest.raises(InvalidRequest, match="drawn without metadata"):
            parameters_of(path)


@needs_curl
def test_the_commands_of_the_page_work(http: Service, client: Client, tmp_path: Path) -> None:
    block = _PAGE.read_text(encoding="utf-8").split("```")[1].strip().replace("\\\n", " ")
    started = ""
    for full, short in (
        ("seed", '"num_inference_steps": 4, "seed'),
        ("strength", '"num_inference_steps": 4, "strength'),
    ):
        block = block.replace(f'"{full}', short)
    block = block.replace('circle"}', 'circle", "bottega": {"num_inference_steps": 4}}')
    for line in block.splitlines():
        command = line.replace("127.0.0.1:8473", http.address).replace("JOB", started)
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=90,
            check=True,
        )
        assert '"error":{' not in done.stdout, command
        if found := re.search(r'"object":"job"', done.stdout):
            started = re.findall(r'"id":"([^"]+)"', done.stdout[: found.start()])[-1]
            client.job(started).result()
    for name in ("star.png", "circle.png"):
        PIL.Image.open(tmp_path / name).verify()
