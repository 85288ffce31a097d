"""The only way from this program to a terminal: lines of text, lines of JSON, and rich tables."""
