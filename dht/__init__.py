"""How peers find each other: signed, expiring records, kept by the nodes nearest to their key."""
