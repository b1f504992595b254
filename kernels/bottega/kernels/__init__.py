"""Triton kernels, one file each: the kernel, a plain reference, its shapes and tolerance, and the cases of its bench.

They are optional: `bottega.engine.acceleration.kernels` tries them at a worker's start, and uses those that are faster
and accurate on its device. They do not depend on a model or an engine. With TRITON_INTERPRET=1 in the environment
before the first import, they run on a CPU, slowly; tests use this where there is no GPU.
"""
