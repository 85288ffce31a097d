"""Agreeing on weights: pure arithmetic on torch tensors, without sockets."""
