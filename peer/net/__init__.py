"""The network process: libp2p host, typed calls, bulk transport, NAT traversal."""
