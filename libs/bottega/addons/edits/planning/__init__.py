"""Which blocks of an edit load what was recorded and which are computed, in plain Python without torch."""
