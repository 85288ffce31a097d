"""The command `peer`."""
