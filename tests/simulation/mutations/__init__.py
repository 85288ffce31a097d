"""Rules of the specification, each switched off in turn, and what notices that."""
