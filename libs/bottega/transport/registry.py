"""The listeners of this process by name, for those in it who have an offer of one. It knows no link."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bottega.transport.listener import LinkListener

_lock = threading.Lock()
_listeners: weakref.WeakValueDictionary[str, LinkListener] = weakref.WeakValueDictionary()


def add(name: str, listener: LinkListener) -> None:
    """Makes a listener known."""
    with _lock:
        _listeners[name] = listener


def remove(name: str) -> None:
    """Forgets a listener."""
    with _lock:
        _listeners.pop(name, None)


def find(name: str) -> LinkListener | None:
    """The listener of that name, if it is in this process and open."""
    with _lock:
        return _listeners.get(name)
