"""CUDA graphs: the kernel launches of a forward pass, recorded once per shape and replayed with one call."""
