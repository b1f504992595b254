"""What is kept of the request of a cancelled job: enough to tell it by, not its texts in full. Knows no job."""

from __future__ import annotations

from bottega.v1.generation_pb2 import GenerationSpec

# Of each text: a line or two for whoever looks through a list. With texts of full length, 64 KiB of each job, a few
# thousand cancelled jobs were all that could be remembered.
KEPT_CHARACTERS = 200
_TEXTS = ("prompt", "prompt_2", "negative_prompt", "negative_prompt_2")
_CUT = "…"


def brief(spec: GenerationSpec) -> GenerationSpec:
    """`spec`, or a copy with the beginnings of its texts where those are long. It is not drawn any more."""
    long = [name for name in _TEXTS if len(getattr(spec, name)) > KEPT_CHARACTERS + len(_CUT)]
    if not long:
        return spec
    kept = GenerationSpec()
    kept.CopyFrom(spec)
    for name in long:
        setattr(kept, name, getattr(spec, name)[:KEPT_CHARACTERS] + _CUT)
    return kept
