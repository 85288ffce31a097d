"""A peer that serves blocks of a model: its choice of blocks, and others' sessions."""
