"""A relay: connections to peers that cannot be dialled, within caps that its owner sets."""
