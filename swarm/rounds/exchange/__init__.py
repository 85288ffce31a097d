"""The exchange of one round: each slice to its owner, merged there, audited by others."""
