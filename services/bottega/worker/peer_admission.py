"""Which worker may open a link to this one, to form a pair with it."""

from __future__ import annotations

from collections.abc import Mapping

from bottega.errors import Forbidden, ModelMismatch, Unavailable
from bottega.v1.image_pb2 import Model
from bottega.v1.link_pb2 import OpenLinkRequest
from bottega.worker.config import EngineConfig


def check_peer(request: OpenLinkRequest, config: EngineConfig, *, worker: str, model: Model | None) -> None:
    """worker: the name of this one. model: that it has loaded; None while it has none.

    Raises Forbidden for a worker that is not the peer; ModelMismatch where the two have different models; Unavailable
    where this one has no peer or no model yet.
    """
    peer = request.worker
    if not config.peer or peer == worker:
        why = "names itself as its peer" if peer == worker else f"has no peer; engine.peer must name {peer}"
        raise Unavailable(f"worker {worker} {why}")
    if config.peer_name and peer != config.peer_name:
        raise Forbidden(f"worker {worker} forms a pair with {config.peer_name}, and not with {peer}")
    if model is None:
        raise Unavailable(f"worker {worker} has not loaded its model yet")
    ours = {"model_hash": model.model_hash, "dtype": model.dtype}
    theirs = {term.name: term.value for term in request.terms}
    if ours != theirs:
        raise ModelMismatch(
            f"workers {peer} and {worker} cannot be a pair: {peer} draws with {_drawn_with(theirs)}, "
            f"{worker} with {_drawn_with(ours)}; give both the same model, or take engine.peer out of their "
            "configurations",
            metadata={peer: theirs.get("model_hash", ""), worker: ours["model_hash"]},
        )


def _drawn_with(terms: Mapping[str, str]) -> str:
    return f"model {terms.get('model_hash', 'unknown')} in {terms.get('dtype', 'an unknown type')}"
