"""Templates of edits, which workers have recorded: calls about them, and what the doctor says."""
