"""Checkpoints on disk: files with hashes, written atomically and read back with checks."""
