"""What a model writes: its thinking, text, and calls of functions, told apart piece by piece."""
