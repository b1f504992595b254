"""Recorded activations in the gateway: where templates are, what loading costs, and messages to workers and stores."""
