"""Codecs, merge and outer step of a round in C: one pass over memory, the bits of the torch code."""

from optim.kernels.codec_kernels import CodecKernels, kernels_for

__all__ = ["CodecKernels", "kernels_for"]
