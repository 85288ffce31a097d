"""Inference with a range of a model's blocks: weights, key/value cache, batches, sampling. It knows of no network."""
