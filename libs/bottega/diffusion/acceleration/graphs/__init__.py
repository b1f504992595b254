"""CUDA graphs: the kernel launches of a forward, recorded once per shape and replayed as a whole.

capture    records and replays on a device recorded   the segments of one shape, over memory with fixed addresses store
the graphs of frequent shapes, within bounds backbone   the denoising network as graphs where possible graphs     the
acceleration
"""
