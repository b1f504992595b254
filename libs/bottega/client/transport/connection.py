"""The connection to a gateway that all parts of the SDK share: addresses, channels and time-outs."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace

import grpc

from bottega.client.instance import StateFolder
from bottega.client.transport.calls import CallDeadline, CallTerms, RequestT, ResponseT, RetryPolicy, call_with_retries
from bottega.client.transport.credentials import Tls, channels_of, checked_key, tls_from_environment
from bottega.client.types.messages import UNSENDABLE, describe
from bottega.errors import ConfigError, DeadlinePassed, Forbidden, InvalidRequest, Unavailable, Violation
from bottega.rpc.address import join_list, resolve_list, split_list
from bottega.rpc.channel import ApiKey, Channels, Target
from bottega.rpc.security.caller import Role
from bottega.state_folder import state_folder
from bottega.v1.fleet_pb2 import ListMembersRequest, ListMembersResponse
from bottega.v1.fleet_pb2_grpc import FleetServiceStub
from bottega.v1.image_pb2_grpc import ImageServiceStub

# Calls that draw nothing are answered in milliseconds; a gateway that takes longer than this hangs.
_SHORT_CALL_S = 30.0
# Seconds for each of several gateways to list its fleet, while others may have answered.
_LOOK_S = 2.0
_LIST = ListMembersRequest()

_LOG = logging.getLogger(__name__)

_of_fleet: ContextVar[Channels | None] = ContextVar("channels of the fleet", default=None)


def service_channels() -> Channels:
    """Return the channel factory for services of the fleet, with the credentials of the client that listed the fleet.

    A task that has not listed a fleet gets the credentials of the environment.
    """
    return _of_fleet.get() or channels_of(tls_from_environment())


class GatewayConnection:
    """A channel with stubs for the calls to one gateway, or to several that share their jobs.

    Make it in a running event loop, and close it.

    Args:
        address: host:port of the gateway. Several: a sequence, a text with commas, or a name that resolves to all.
        fleet_address: The same of its listener for services; None for the default, found when the fleet is listed.
        api_key: Key that is sent to the gateway only; empty for none, and a function for the key of each call.
        tls: Certificates; None for connections that are not encrypted.
        channels: Opens the channels instead, with certificates of its own.
        timeout_s: Default time-out of a call in seconds.
        retry: How to retry.

    Raises:
        InvalidRequest: An address, the key or the time-out is invalid.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        fleet_address: str | Sequence[str] | None = None,
        api_key: ApiKey = "",
        tls: Tls | None = None,
        channels: Channels | None = None,
        timeout_s: float,
        retry: RetryPolicy,
    ) -> None:
        self.address = _as_text("address", address)
        self._fleet_address = None if fleet_address is None else _as_text("fleet_address", fleet_address)
        self._fleet_channels: dict[str, grpc.aio.Channel] = {}
        self._timeout_s = CallDeadline.after(timeout_s).allowed_s
        self._retry = retry
        self._tls = tls
        self.channels = channels or channels_of(tls)
        self.shows_key = bool(checked_key(api_key))
        self._reported = False
        self._channel = self._open("address", self.address, api_key=checked_key(api_key))
        self.images = ImageServiceStub(self._channel)
        if self._fleet_address is not None:
            self._open_fleet(self._fleet_address)

    def terms(self, timeout_s: float | None) -> CallTerms:
        """Return the terms of a call with this time-out; None for the connection's own."""
        deadline = CallDeadline.after(self._timeout_s if timeout_s is None else timeout_s)
        return CallTerms(
            address=self.address,
            deadline=deadline,
            retry=self._retry,
            encrypted=self.channels.encrypted,
            report_unreached=self._report_unreached,
        )

    async def call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT],
        request: RequestT,
        *,
        before_try: Callable[[RequestT], None] = lambda _: None,
    ) -> ResponseT:
        """Return the response to a call other than those that draw. `before_try` is as in call_with_retries."""
        return await call_with_retries(method, request, self._short_terms(), before_try=before_try)

    async def fleets(self) -> Mapping[str, ListMembersResponse | None]:
        """Return the members that each gateway lists, by its fleet address; None for one that does not answer.

        If none answers, the call goes on trying as other calls do, and raises the error of one.
        """
        address = await self._find_fleet()
        addresses = await resolve_list(split_list(address))
        if len(addresses) > 1:
            answers = await asyncio.gather(*map(self._members_at, addresses))
            if any(answer is not None for answer in answers):
                return dict(zip(addresses, answers, strict=True))
        return {address: await self.call_fleet(lambda channel: FleetServiceStub(channel).ListMembers, _LIST)}

    async def call_fleet(
        self,
        method_of: Callable[[grpc.aio.Channel], grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT]],
        request: RequestT,
    ) -> ResponseT:
        """Return the response of the gateway's listener for services, which other calls do not need.

        Raise Forbidden if the listener asks for a certificate and the client has only an API key.
        """
        address = await self._find_fleet()
        terms = replace(self._short_terms(), address=address, fleet=True, report_unreached=lambda: None)
        return await call_with_retries(method_of(self._open_fleet(address)), request, terms)

    async def close(self) -> None:
        await self._channel.close()
        for channel in self._fleet_channels.values():
            await channel.close()

    async def _find_fleet(self) -> str:
        """Return the address of the listener for services, or the list of them. Raises Forbidden, see call_fleet."""
        if self.shows_key and self._tls is not None and self._tls.certificate is None:
            raise Forbidden("this needs an operator's certificate; an API key is a tenant's")
        if self._fleet_address is None:
            self._fleet_address = await asyncio.to_thread(default_fleet_address, self.address)
        _of_fleet.set(self.channels)
        return self._fleet_address

    def _open_fleet(self, address: str) -> grpc.aio.Channel:
        if address not in self._fleet_channels:
            self._fleet_channels[address] = self._open("fleet_address", address)
        return self._fleet_channels[address]

    async def _members_at(self, address: str) -> ListMembersResponse | None:
        """Return the members that one of several gateways lists; None if it does not answer."""
        once = RetryPolicy(patience_s=0.0)
        terms = replace(self.terms(_LOOK_S), address=address, fleet=True, retry=once, report_unreached=lambda: None)
        try:
            return await call_with_retries(FleetServiceStub(self._open_fleet(address)).ListMembers, _LIST, terms)
        except (Unavailable, DeadlinePassed):
            return None

    def _report_unreached(self) -> None:
        """Log once that nothing answers, because the caller would otherwise wait without knowing why."""
        if self._reported or self._channel.get_state() is grpc.ChannelConnectivity.READY:
            return
        self._reported = True
        _LOG.warning(
            "no gateway answers at %s yet; still trying. Start one with `bottega up`, or set another address or %s",
            self.address,
            ADDRESS_VARIABLE,
        )

    def _short_terms(self) -> CallTerms:
        return self.terms(min(_SHORT_CALL_S, self._timeout_s))

    def _open(self, name: str, address: str, *, api_key: ApiKey = "") -> grpc.aio.Channel:
        """Return a channel, which connects when it is first used. Errors blame the argument `name` for the address."""
        try:
            return self.channels.open(Target(address=address, role=Role.GATEWAY, balances=True), api_key=api_key)
        except ConfigError as error:
            raise _refusal(name, error.message) from None
        except (AttributeError, *UNSENDABLE):  # AttributeError: gRPC's, for an address that is no text
            raise _refusal(name, f"must be HOST:PORT; got {describe(address)}") from None


def _as_text(name: str, address: str | Sequence[str]) -> str:
    """Return addresses as one text. Raise InvalidRequest if a list is wrong; gRPC judges a single address."""
    if isinstance(address, str) and "," not in address:
        return address
    try:
        return join_list(address)
    except (ConfigError, TypeError) as error:
        why = error.message if isinstance(error, ConfigError) else f"must be HOST:PORT; got {describe(address)}"
        raise _refusal(name, why) from None


def _refusal(name: str, rule: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: {rule}", violations=[Violation(field=name, description=rule)])


ADDRESS_VARIABLE = "BOTTEGA_ADDRESS"
FLEET_VARIABLE = "BOTTEGA_FLEET"
DEFAULT_PORT = 8470
DEFAULT_FLEET_PORT = 8472


def default_address() -> str:
    """Return the default address of the gateway: host:port, or a list as $BOTTEGA_ADDRESS may have it.

    It is $BOTTEGA_ADDRESS, else that of the suite that runs from the state folder, else the default port on this
    machine.
    """
    if chosen := os.environ.get(ADDRESS_VARIABLE):
        return chosen
    running = StateFolder(state_folder()).running()
    return running.address if running else f"127.0.0.1:{DEFAULT_PORT}"


def default_fleet_address(address: str) -> str:
    """Return the default address of the listener for services of the gateway, or gateways, at `address`.

    It is $BOTTEGA_FLEET, else that of the suite that runs from the state folder, else the default port on each
    gateway's machine.
    """
    if chosen := os.environ.get(FLEET_VARIABLE):
        return chosen
    record = StateFolder(state_folder()).running()
    if record is not None and _as_number(record.address) == _as_number(address):
        return record.fleet_address
    hosts = [one.rpartition(":")[0] if ":" in one else one for one in split_list(address)]
    return ",".join(f"{host}:{DEFAULT_FLEET_PORT}" for host in dict.fromkeys(hosts))


def _as_number(address: str) -> str:
    return address.replace("localhost:", "127.0.0.1:")
