"""Membership of the run: member records, bans, and whether a peer can be reached."""
