"""The parts of a run: RUN.toml, manifest, invite, tokens, the gate, and a peer's home."""
