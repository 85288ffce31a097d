"""Several devices of one machine as one group of ranks: empty until it is built."""
