"""Who calls, and how that is known."""
