"""Recorded activations of edits: where templates are, what loading costs, and what attempts and stores are told."""
