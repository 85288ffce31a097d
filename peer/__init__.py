"""One machine: its network half, its compute half, and what both share."""
