"""A peer that serves blocks of a model: its weights in parts, its choice of blocks, and others' sessions."""
