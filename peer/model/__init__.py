"""The model: its decoder, flat layout, cut into stages, generation, Hugging Face files."""
