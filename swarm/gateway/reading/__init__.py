"""What a model writes: its thinking, text, and calls of functions, separated piece by piece."""
