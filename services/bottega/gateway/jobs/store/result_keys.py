"""Which requests ask for the same picture: the result key, a digest of all that a picture is made of.

What is only a name takes no part: the model counts by its hash, LoRAs and the weights of ControlNets by theirs, input
images by theirs. Everything else that a completed spec says counts, also what changes no pixel: at worst a picture is
drawn again. A request that measures something has no key, as what it asks for is the measurement.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from bottega.v1.generation_pb2 import FIDELITY_EXACT, GenerationSpec, Provenance

# Keys that were made by other rules are none of these. 2: pictures that an earlier version called exact may not be.
_RULES = 2


def result_key(outline: GenerationSpec, *, model_hash: str, dtype: str, versions: Sequence[str], tenant: str) -> str:
    """The key of a request, 64 hex digits; empty where it has none, as not all that it is made of is known.

    outline: complete, with the SHA-256 of each input image, hex, in the image's place. model_hash, dtype: of the model.
    versions: hashes of the weights of its ControlNets, in their order. tenant: whose request it is.
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
    """The key of the requests that a finished job's pictures answer; empty where they answer none.

    bare: its spec, complete, without input images; one that says keep_unmasked had a mask. EXACT is answered by what is
    exact only.
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
    """Whether a stored result may be the answer is no part of what is drawn."""
    if spec.HasField("techniques"):
        spec.techniques.ClearField("identical_results")
        if not spec.techniques.ListFields():
            spec.ClearField("techniques")
