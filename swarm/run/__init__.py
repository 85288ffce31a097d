"""What a run is: RUN.toml, manifest, invite, tokens, the gate, and a peer's home."""
