"""Blocking twins of the asyncio SDK's methods: each runs the asyncio method on a loop, and waits.

A method is written once, in the asyncio class. Its blocking twin is one line (`models = blocking(Async.models)`), which
has the same arguments for the type checker and the same documentation for people.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any, Concatenate, ParamSpec, TypeVar

from bottega.client.sdk.loop_thread import LoopThread

P = ParamSpec("P")
T = TypeVar("T")
WrappedT = TypeVar("WrappedT")
OwnerT = TypeVar("OwnerT", bound="OnLoop")


class OnLoop:
    """A wrapper of an object of the asyncio SDK and the loop that its methods run on."""

    _async: Any
    _loop: LoopThread


def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[OnLoop, P], T]:
    """Return a method that waits for the result of `method`."""

    def call(self: OnLoop, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._loop.run(method(self._async, *args, **kwargs))

    return _documented(call, method)


def blocking_as(
    wrap: Callable[[OwnerT, T], WrappedT],
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[OwnerT, P], WrappedT]:
    """Return a method that waits for the result of `method`, and wraps it into its own blocking twin."""

    def call(self: OwnerT, /, *args: P.args, **kwargs: P.kwargs) -> WrappedT:
        return wrap(self, self._loop.run(method(self._async, *args, **kwargs)))

    return _documented(call, method, returns=inspect.signature(wrap).return_annotation)


def iterating(
    method: Callable[Concatenate[Any, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[OnLoop, P], Generator[T, None, None]]:
    """Return a method whose generator yields what the asynchronous generator `method` yields."""

    def call(self: OnLoop, /, *args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        return self._loop.iterate(method(self._async, *args, **kwargs))

    return _documented(call, method, returns="Generator[Event, None, None]")


CallT = TypeVar("CallT", bound=Callable[..., Any])


def _documented(call: CallT, method: Callable[..., Any], *, returns: object = None) -> CallT:
    """Give a call the name, documentation and signature of `method`, with another return type if one is given."""
    functools.update_wrapper(call, method, assigned=("__name__", "__doc__"), updated=())
    if returns is not None:
        signature = inspect.signature(method).replace(return_annotation=returns)
        call.__signature__ = signature  # type: ignore[attr-defined]
    return call
