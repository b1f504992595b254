"""What a caller may name: its tenant's own and what is for all, and of that what it was given."""

from __future__ import annotations

import pytest

from bottega.addons.interface.views import ANYTHING, Access
from bottega.rpc.security.caller import LOCAL, Caller, Grants, Role

SHOP = Access(tenant="shop")
GIVEN = Access(tenant="shop", grants=Grants(models=("m",), loras=("ink",), controlnets=("edges",)))


def test_who_is_no_tenant_may_name_all_there_is() -> None:
    assert Access.of(LOCAL) == ANYTHING == Access.of(Caller(role=Role.OPERATOR, name="anna"))
    assert ANYTHING.has_model("m")
    assert ANYTHING.has_lora("ink@shop")
    assert ANYTHING.has_controlnet("edges@shop")
    assert ANYTHING.own("ink") == ""


def test_a_caller_has_its_tenants_grants() -> None:
    caller = Caller(role=Role.TENANT, name="shop", tenant="shop", grants=GIVEN.grants)
    assert Access.of(caller) == GIVEN


def test_without_grants_a_tenant_may_have_its_own_and_all_that_is_for_all() -> None:
    names = ("ink", "ink@shop", "ink@press", "ink@")
    assert [SHOP.has_lora(name) for name in names] == [True, True, False, False]
    assert [SHOP.has_controlnet(name) for name in names] == [True, True, False, False]
    assert SHOP.has_model("anything")


def test_with_grants_a_tenant_may_have_its_own_and_those() -> None:
    names = ("ink", "wash", "wash@shop", "ink@press")
    assert [GIVEN.has_lora(name) for name in names] == [True, False, True, False]
    names = ("edges", "depth", "depth@shop", "edges@press")
    assert [GIVEN.has_controlnet(name) for name in names] == [True, False, True, False]
    assert [GIVEN.has_model(name) for name in ("m", "n")] == [True, False]
    only_models = Access(tenant="shop", grants=Grants(models=("m",)))
    assert only_models.has_lora("wash"), "each kind by itself"


@pytest.mark.parametrize(
    ("name", "own"),
    [("ink", "ink@shop"), ("ink@shop", ""), ("ink@press", ""), ("x" * 195, f"{'x' * 195}@shop"), ("x" * 196, "")],
)
def test_a_name_may_be_of_its_own(name: str, own: str) -> None:
    assert SHOP.own(name) == own
