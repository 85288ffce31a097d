"""Read-only access to a run: its records, heads and states, without taking part."""
