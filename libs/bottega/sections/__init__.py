"""Sections of recorded activations: what their files hold, and what workers and stores say of them over a link."""

from bottega.sections.section import SECTION_ALIGNMENT, DrawnTensors, SectionLayout, SectionTensor

__all__ = ["SECTION_ALIGNMENT", "DrawnTensors", "SectionLayout", "SectionTensor"]
