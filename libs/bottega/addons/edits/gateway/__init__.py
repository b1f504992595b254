"""Recorded activations in the gateway: locations of templates, costs of loading, and orders to workers and stores."""
