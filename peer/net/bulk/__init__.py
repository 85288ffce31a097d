"""Big payloads between directly reachable peers, by TLS."""
