"""The approximate cache: which requests may use it, what their pins are, and how many steps it is expected to save."""
