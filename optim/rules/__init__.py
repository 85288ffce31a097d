"""How a slice's owner merges: mean, trimmed mean, median or Flag."""
