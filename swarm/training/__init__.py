"""A peer's life in a run: join, open a replica, train, move, back up, leave."""
