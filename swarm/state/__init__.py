"""The state of a group: flat vectors in mapped files, snapshots, and their transfer to joiners."""
