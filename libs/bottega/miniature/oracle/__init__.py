"""The oracle: reads shape, colour, size, place, ground and relation back from a picture. No torch here."""

from bottega.miniature.oracle.reading import NOTHING, Reading, Seen, agrees, marks, read

__all__ = ["NOTHING", "Reading", "Seen", "agrees", "marks", "read"]
