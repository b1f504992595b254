"""Which ControlNets a request may have, as hosts come and go, on a clock that the test turns."""

from __future__ import annotations

import pytest

from bottega import kinds
from bottega.addons.controlnets.gateway.hosts import ControlNetHosts
from bottega.addons.interface.views import ANYTHING, Access, Member
from bottega.errors import ControlNetNotFound, ControlNetUnusable, NoControlNet
from bottega.gateway.fleet.registry import Fleet
from bottega.rpc.security.caller import Grants
from bottega.v1 import fleet_pb2, image_pb2
from bottega.v1.hosted_pb2 import Hosted
from tests.fakes.fake_time import FakeTime
from tests.samples.controlnet_hosts import BASE, LOADED, ON_DISK, again, bounds, load, net, server, worker

MODEL = image_pb2.Model(name="m", base=BASE)


class House:
    """A fleet with a worker of the model "m", and who hosts ControlNets in it."""

    def __init__(self) -> None:
        self.time = FakeTime()
        self.fleet = Fleet(lease_s=1.5, model_grace_s=30, bounds=bounds(6), clock=self.time.clock())
        self.nets = ControlNetHosts(grace_s=self.fleet.grace_s, clock=self.time.clock())
        self.fleet.subscribe(self)
        self.worker = self.fleet.join(worker())

    def member_joined(self, member: Member) -> None:
        """It has reported nothing yet."""

    def member_changed(self, member: Member) -> None:
        self.nets.update(member)

    def member_lost(self, member: Member) -> None:
        self.nets.remove(member)

    def server(self, *nets: Hosted, name: str = "s1") -> Member:
        member = self.fleet.join(server(name, port=100 + len(self.fleet.members())))
        self.fleet.report(member, load(*nets))
        return member

    def resolve(self, *names: str, model: image_pb2.Model = MODEL, access: Access = ANYTHING) -> None:
        self.nets.check(names, model, access)

    def hosts(self, name: str = "edges") -> list[str]:
        return [member.name for member, _ in self.nets.hosts(name, BASE)]


@pytest.fixture
def house() -> House:
    return House()


def test_an_unknown_one_is_not_found_with_those_that_are_hosted_for_the_model(house: House) -> None:
    house.server(net("edges"), net("depth"), net("pose", base="another"))
    with pytest.raises(ControlNetNotFound) as caught:
        house.resolve("lines", "edges", "marks")
    assert "lines, marks" in caught.value.message
    assert caught.value.metadata == {"served": "depth,edges"}


def test_one_for_another_base_model_is_refused_and_both_are_named(house: House) -> None:
    house.server(net("edges", base="base of sdxl"))
    with pytest.raises(ControlNetUnusable) as caught:
        house.resolve("edges")
    for said in ("edges", "base of sdxl", "m is base of m"):
        assert said in caught.value.message
    house.server(net("edges"), name="s2")
    house.resolve("edges")
    assert house.hosts() == ["s2"]
    house.server(net("depth", base=""), name="s3")
    house.resolve("depth")  # whoever loads it says whether it fits
    house.resolve("edges", model=image_pb2.Model(name="m"))


def test_one_is_waited_for_within_the_grace_and_unavailable_afterwards(house: House) -> None:
    member = house.server(net("edges"))
    house.fleet.leave(member, member.stream)
    assert house.hosts() == []
    house.time.now += 29
    house.fleet.expire()
    house.resolve("edges")
    assert (house.nets.is_there("edges"), house.nets.is_there("depth")) == (True, False)
    house.time.now += 2
    assert not house.nets.is_there("edges")
    with pytest.raises(NoControlNet):
        house.resolve("edges")
    house.server(net("depth"), name="s2")
    with pytest.raises(NoControlNet):
        house.resolve("edges")  # known, and not unknown


def _waited_s(house: House) -> float:
    """For how long "edges" is waited for from now on."""
    began = house.time.now
    while house.nets.expected("edges", "m", BASE):
        house.time.now += 1
    return house.time.now - began


@pytest.mark.parametrize("of", ["a server's", "a worker's own"])
def test_one_is_waited_for_as_long_as_its_host_takes_to_start(house: House, of: str) -> None:
    slow = house.server(net("edges")) if of == "a server's" else house.worker
    quick = house.server(net("edges"), name="s2")
    said = load(net("edges"))
    said.start_s = 60
    house.fleet.report(slow, said)
    for member in (slow, quick):
        house.fleet.leave(member, member.stream)
    assert _waited_s(house) == 120


def test_what_a_server_that_is_here_has_given_up_is_waited_for_no_longer_than_others(house: House) -> None:
    member = house.server(net("edges"), net("depth"))
    said = load(net("depth"))
    said.start_s = 60
    house.fleet.report(member, said)
    assert _waited_s(house) == 30


def test_a_server_that_is_back_hosts_again_with_its_first_report(house: House) -> None:
    member = house.server(net("edges"))
    house.fleet.leave(member, member.stream)
    assert house.fleet.join(again(member.registration)) is member
    assert house.hosts() == []
    house.fleet.report(member, load(net("edges")))
    assert house.hosts() == ["s1"]


def test_what_a_server_does_not_report_any_more_it_does_not_host_nor_anything_when_it_is_lost(house: House) -> None:
    member = house.server(net("edges"), net("depth"))
    house.fleet.report(member, load(net("depth")))
    assert (house.hosts("edges"), house.hosts("depth")) == ([], ["s1"])
    assert (house.nets.count(LOADED), house.nets.count(ON_DISK)) == (1, 0)
    house.time.now += 2
    house.fleet.expire()
    assert house.hosts("depth") == []


def test_a_workers_own_serve_the_jobs_of_its_model_only(house: House) -> None:
    other = house.fleet.join(worker("w2", model="n", port=2))
    house.fleet.report(other, load(net("edges")))
    with pytest.raises(ControlNetNotFound):
        house.resolve("edges")
    house.fleet.report(house.worker, load(net("edges")))
    house.resolve("edges")


def test_other_kinds_of_services_host_no_controlnets(house: House) -> None:
    store = fleet_pb2.Registration(kind=kinds.LORAS, name="l", address="127.0.0.1:9", instance="a store of LoRAs")
    house.fleet.report(house.fleet.join(store), load(net("edges")))
    assert house.hosts() == []


def test_names_that_were_hosted_once_are_remembered_within_a_bound(house: House) -> None:
    for number in range(6):
        member = house.server(*(net(f"net-{number}-{index}") for index in range(1024)))
        house.fleet.leave(member, member.stream)
    assert len(house.nets._expected_until) == 4096
    house.resolve("net-5-0")
    with pytest.raises(ControlNetNotFound):
        house.resolve("net-0-0")
    for number in range(20):
        member = house.server(net("edges", base=f"base {number}"))
        house.fleet.leave(member, member.stream)
    assert len(house.nets._expected_until["edges"]) == 8, "and each for a few bases"


def test_what_is_anothers_or_not_granted_is_as_nothing(house: House) -> None:
    shop = Access(tenant="shop", grants=Grants(controlnets=("edges",)))
    house.server(net("pose@press"), net("depth"), net("marks", base="another"))
    names = ("pose@press", "depth", "marks", "lines", "lines@press")
    for name in names:
        with pytest.raises(NoControlNet) as nothing:  # as before anybody hosted anything
            house.resolve(name, access=shop)
        assert nothing.value.message == f"nobody hosts {name} now"
    house.server(net("edges"), net("pose@shop"), name="s2")
    house.resolve("edges", "pose@shop", access=shop)
    for name in names:
        with pytest.raises(ControlNetNotFound) as refused:
            house.resolve(name, access=shop)
        assert refused.value.message == f"no such ControlNet: {name}; hosted for m: edges, pose@shop"
        assert refused.value.metadata == {"served": "edges,pose@shop"}


def test_which_version_is_drawn_with_is_certain_where_all_that_host_it_have_the_same(house: House) -> None:
    assert house.nets.version("edges", MODEL) == ""
    first = house.server(net("edges", digest="v1"), net("depth", digest="v1", base="another"))
    house.server(net("edges", digest="v1"), name="s2")
    assert house.nets.version("edges", MODEL) == "v1"
    assert house.nets.version("depth", MODEL) == "", "for another base"
    third = house.server(net("edges", digest="v2"), name="s3")
    assert house.nets.version("edges", MODEL) == ""
    house.fleet.leave(third, third.stream)
    assert house.nets.version("edges", MODEL) == "v1"
    house.fleet.report(house.worker, load(net("edges", digest="v2")))
    assert house.nets.version("edges", MODEL) == "", "a worker of the model has another one itself"
    assert house.nets.version("edges", image_pb2.Model(name="other", base=BASE)) == "v1"
    house.fleet.report(house.worker, load())
    house.fleet.report(first, load(net("edges", digest="")))
    assert house.nets.version("edges", MODEL) == "", "a server does not say which it has"
