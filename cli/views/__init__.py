"""Terminal views of events: what they add up to, the live table, and the audit of micro-batches."""
