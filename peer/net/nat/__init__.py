"""Reaching peers that have no open port: relay reservations, circuits through relays, hole punching."""
