"""CUDA graphs: the kernel launches of a forward, recorded once per shape and replayed as a whole."""
