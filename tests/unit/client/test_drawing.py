"""What commands that draw say of a picture."""

from __future__ import annotations

from typing import Any

import pytest

from bottega.client.cli.drawing import note_approximate, note_unknown_to_embedded_model
from bottega.client.types.options import FidelityName
from bottega.client.types.provenance import Parameters, Provenance


@pytest.mark.parametrize(
    ("exact", "fidelity", "said"),
    [
        (True, "balanced", ""),
        (False, "balanced", "the picture is approximate; --fidelity exact draws it as stock Diffusers does\n"),
        (
            False,
            "exact",
            "the picture is approximate despite --fidelity exact, because another option allows it\n",
        ),
    ],
)
def test_one_line_says_that_a_picture_is_approximate_and_how_to_have_it_exact(
    exact: bool, fidelity: FidelityName, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    note_approximate(Provenance(exact=exact, parameters=Parameters(fidelity=fidelity)))
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    "decoded", [Provenance(vae_tiled=True), Provenance(dtype="float16", vae_dtype="bfloat16")], ids=["tiled", "type"]
)
def test_a_picture_that_the_operator_made_approximate_is_not_said_to_become_exact(
    decoded: Provenance, capsys: pytest.CaptureFixture[str]
) -> None:
    note_approximate(decoded)
    assert "as the operator configured" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"prompt": "A big red star, on the left; on a blue background."}, False),
        ({"prompt": "a cat"}, True),
        ({"prompt": "a cat", "model": "sdxl"}, False),
        ({"prompt": "a red star", "height": 128}, True),
    ],
)
def test_one_line_says_what_the_embedded_model_was_not_trained_for(
    parameters: dict[str, Any], told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    spec: dict[str, Any] = {"model": "miniature", "width": 64, "height": 64, **parameters}
    note_unknown_to_embedded_model(Parameters(**spec))
    note = "miniature, the embedded model, only draws simple shapes; `bottega up --model FOLDER` serves yours\n"
    assert capsys.readouterr().err == (note if told else "")


def test_rounding_by_shared_turns_is_the_stated_cause_with_the_way_to_avoid_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts: dict[str, Any] = {"dtype": "bfloat16", "vae_dtype": "bfloat16", "shared_in_half_precision": True}
    note_approximate(Provenance(parameters=Parameters(), **facts))
    cause = "the picture is approximate: in bfloat16, its steps were computed in batches with others or in parts"
    advice = "; --fidelity exact computes them alone, as stock Diffusers does"
    assert capsys.readouterr().err == f"{cause}, which changes the rounding{advice}\n"
    note_approximate(Provenance(parameters=Parameters(shared_turns=False), **facts))
    assert capsys.readouterr().err == f"{cause}, which changes the rounding\n"
