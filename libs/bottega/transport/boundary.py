"""Where a fault on a link stops: it ends that link, and nothing else of its process. It knows no message."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from bottega.errors import BadFrame, BottegaError, LinkError, PeerDead
from bottega.transport.link import Link

_log = logging.getLogger(__name__)


@contextmanager
def link_boundary(link: Link, *, here: str, peer: str) -> Iterator[None]:
    """Ends the link with whatever the block raises; a ValueError is what the peer has said against the rules.

    here, peer: what the two ends are, as texts name them: "the worker".
    """
    try:
        yield
    except LinkError as error:
        link.end(error)
    except ValueError as error:
        link.end(BadFrame(f"{peer} broke the rules of its messages: {error}"))
    except BottegaError as error:
        link.end(PeerDead(f"{here} could not go on with the link: {error.message}"))
    except Exception:  # noqa: BLE001 - the boundary of a link: a fault of ours ends this one only
        _log.exception("a link could not be served", extra={"link_id": link.link_id, "peer": peer})
        link.end(PeerDead(f"{here} could not serve the link"))
