"""Files of recorded activations (sections), and the messages of workers and stores about them."""

from bottega.addons.edits.wire.section import SECTION_ALIGNMENT, DrawnTensors, SectionLayout, SectionTensor

__all__ = ["SECTION_ALIGNMENT", "DrawnTensors", "SectionLayout", "SectionTensor"]
