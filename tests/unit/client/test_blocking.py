"""The client without asyncio has the methods of the one with it, and each is that one's."""

from __future__ import annotations

import inspect

import pytest

from bottega.client import AsyncClient, AsyncJob, Client, Job
from bottega.client.addons import add_ons_by_command

PAIRS = [(AsyncClient, Client), (AsyncJob, Job)]


def _methods(kind: type) -> set[str]:
    return {name for name, member in inspect.getmembers(kind, callable) if not name.startswith("_")}


def test_the_clients_have_the_methods_of_every_add_on() -> None:
    expected = {f"{package}.sdk" for package in add_ons_by_command().values()}
    for client in (AsyncClient, Client):
        assert {base.__module__ for base in client.__bases__} == expected


@pytest.mark.parametrize(("asynchronous", "blocking"), PAIRS)
def test_both_clients_offer_the_same(asynchronous: type, blocking: type) -> None:
    assert _methods(asynchronous) == _methods(blocking) != set()
    for name in _methods(asynchronous):
        theirs, ours = getattr(asynchronous, name), getattr(blocking, name)
        assert inspect.signature(ours).parameters == inspect.signature(theirs).parameters, name
        assert ours.__doc__, name
        assert not inspect.iscoroutinefunction(ours), name


def test_help_names_what_comes_back_without_asyncio() -> None:
    assert inspect.signature(Client.generate).return_annotation == "Picture"
    assert inspect.signature(Client.submit).return_annotation == "Job"
    assert inspect.signature(Client.stream).return_annotation == "Generator[Event, None, None]"
    assert "idempotency key" in (Client.stream.__doc__ or "")
