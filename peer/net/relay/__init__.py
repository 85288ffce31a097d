"""A relay: connections between peers of which one cannot be dialled, within caps that its owner sets."""
