"""Micro-batches that a stage has lost: found, dispatched again, and given up at the end."""
