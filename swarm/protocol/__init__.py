"""Messages of a round, and the pure rules that all peers compute alike: heads, plans, ledger, agreement."""
