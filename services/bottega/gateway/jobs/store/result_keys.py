"""Result keys, which say which requests ask for the same picture: digests of all that a picture is made of.

Names take no part: models, LoRAs, weights of ControlNets and input images count by their hashes. Everything else in a
complete spec counts, even if it changes no pixel: at worst a picture is drawn again. A request that measures something
has no key, because it asks for the measurement.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from bottega.v1.generation_pb2 import FIDELITY_EXACT, GenerationSpec, Provenance

# Version of the rules; keys of other versions do not match. 2: what an earlier version called exact may not be.
_RULES = 2


def result_key(outline: GenerationSpec, *, model_hash: str, dtype: str, versions: Sequence[str], tenant: str) -> str:
    """Return the key of a request, 64 hex digits; empty if not all that its picture is made of is known.

    Args:
        outline: Complete spec with the SHA-256 of each input image, in hex, in the image's place.
        model_hash: Hash of the model.
        dtype: Data type of the model.
        versions: Hashes of the weights of its ControlNets, in their order.
        tenant: The tenant that asks.
    """
    digests = [*versions, *(lora.digest for lora in outline.loras), *(net.image for net in outline.controlnets)]
    known = len(versions) == len(outline.controlnets) and all((model_hash, dtype, *digests))
    if not known or _measures(outline):
        return ""
    named = GenerationSpec()
    named.CopyFrom(outline)
    named.model = model_hash
    for lora in named.loras:
        lora.name = ""
    for net, version in zip(named.controlnets, versions, strict=True):
        net.name = version
    _forget_switch(named)
    facts = json.dumps([_RULES, tenant, dtype]).encode()
    return hashlib.sha256(facts + b"\n" + named.SerializeToString(deterministic=True)).hexdigest()


def key_of_result(bare: GenerationSpec, provenance: Provenance, *, tenant: str) -> str:
    """Return the key of the requests that a completed job's pictures answer; empty if they answer none.

    An EXACT request is answered only by exact pictures.

    Args:
        bare: The job's complete spec without input images. If it says keep_unmasked, it had a mask.
        provenance: The job's provenance.
        tenant: The job's tenant.
    """
    if bare.fidelity == FIDELITY_EXACT and not provenance.exact:
        return ""
    if len(provenance.controlnets) != len(bare.controlnets) or bare.HasField("keep_unmasked") != bool(
        provenance.mask.digest
    ):
        return ""
    outline = GenerationSpec()
    outline.CopyFrom(bare)
    if provenance.image_digest:
        outline.image = provenance.image_digest.encode()
    if provenance.mask.digest:
        outline.mask_image = provenance.mask.digest.encode()
    for net, use in zip(outline.controlnets, provenance.controlnets, strict=True):
        net.image = use.image_digest.encode()
    versions = [use.digest for use in provenance.controlnets]
    return result_key(
        outline, model_hash=provenance.model_hash, dtype=provenance.dtype, versions=versions, tenant=tenant
    )


def _measures(spec: GenerationSpec) -> bool:
    return any(lora.measure_similarity for lora in spec.loras) or any(
        net.measure_similarity for net in spec.controlnets
    )


def _forget_switch(spec: GenerationSpec) -> None:
    """Clear the switch for stored results, which does not change the picture."""
    if spec.HasField("techniques"):
        spec.techniques.ClearField("identical_results")
        if not spec.techniques.ListFields():
            spec.ClearField("techniques")
