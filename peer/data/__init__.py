"""Text and tokens: the corpus on this machine's disk, samplers, tokenizers."""
