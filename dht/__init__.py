"""Finding each other: signed, expiring, sub-keyed records on the nodes nearest to their key."""
