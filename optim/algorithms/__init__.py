"""The formulas of the methods, on flat vectors: outer steps, votes, sparse messages, fragments."""
