"""A corpus as pages of token ids that are known by their hashes: the format, building it, and reading samples."""
