"""Triton kernels, a file each: the kernel, its plain reference, its shapes, its tolerance, and the cases of its bench.

Nothing needs them to run: `bottega.diffusion.acceleration.kernels` tries them at a worker's start, and keeps those that
are faster and equal on its device. They know no model and no engine. With TRITON_INTERPRET=1 in the environment before
the first of them is imported they run on a CPU, slowly, which is how they are tested where there is no GPU.
"""
