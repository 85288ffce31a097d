"""Inference for a client of a served model: servers' records, routes through them, and sessions. No torch."""
