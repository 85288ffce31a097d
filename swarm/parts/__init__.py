"""The weights of a model in parts, a part for each block: their sizes, files, hashes, and how peers pass them on."""
