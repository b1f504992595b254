"""What `bottega templates pin` and `warm` say of templates for which nothing was done."""

from __future__ import annotations

import pytest

from bottega.addons.edits.client.cli import _fail_unchanged
from bottega.addons.edits.client.types import TemplateOverview, template_from
from bottega.v1.activations_pb2 import Template

ID = "3f0a91c25e" + "0" * 22


@pytest.mark.parametrize(
    ("store", "workers", "said"),
    [
        ("activations", ("w1",), "the memory of activations has no room for all of 3f0a91c25e"),
        ("", ("w1",), "3f0a91c25e is in no store, only in w1"),
        ("", (), "no store has the template 3f0a91c25e"),
    ],
)
def test_who_lacks_a_template_is_said(
    capsys: pytest.CaptureFixture[str], store: str, workers: tuple[str, ...], said: str
) -> None:
    known = (template_from([Template(id=ID)], store=store, workers=workers),) if store or workers else ()
    with pytest.raises(SystemExit):
        _fail_unchanged([ID[:10]], TemplateOverview(templates=known, holders=(), silent=()))
    assert said in " ".join(capsys.readouterr().err.split())
