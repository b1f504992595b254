"""Recorded activations of edits: where templates are, what loading them costs, and orders to workers and stores."""
