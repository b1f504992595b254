"""What `bottega templates pin` and `warm` say of templates for which nothing was done."""

from __future__ import annotations

import pytest

from bottega.addons.edits.client.cli import _fail_unchanged
from bottega.addons.edits.client.types import FleetTemplate, TemplateOverview, template_from
from bottega.v1.activations_pb2 import Template

ID = "3f0a91c25e" + "0" * 22


def _said(capsys: pytest.CaptureFixture[str], *known: FleetTemplate) -> str:
    with pytest.raises(SystemExit):
        _fail_unchanged([ID[:10]], TemplateOverview(templates=known, holders=(), silent=()))
    return " ".join(capsys.readouterr().err.split())


def _known(*, store: str, workers: tuple[str, ...] = ()) -> FleetTemplate:
    return template_from([Template(id=ID)], store=store, workers=workers)


def test_a_template_that_memory_has_no_room_for_is_not_said_to_be_in_no_store(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = _said(capsys, _known(store="activations", workers=("w1",)))
    assert "the memory of activations has no room for all of 3f0a91c25e" in said
    assert "no store" not in said


def test_a_template_of_workers_alone_is_in_no_store(capsys: pytest.CaptureFixture[str]) -> None:
    assert "3f0a91c25e is in no store, only in w1" in _said(capsys, _known(store="", workers=("w1",)))


def test_a_template_of_nobody_is_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no store has the template 3f0a91c25e" in _said(capsys)
