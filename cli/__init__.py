"""The command `peer`: one file a command."""
