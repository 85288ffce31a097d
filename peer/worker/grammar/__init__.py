"""Grammars of answers in a process of their own: a confined one compiles schemas and makes masks, the client asks."""
