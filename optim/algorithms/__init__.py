"""Ways for a group to agree on weights: one file each, all on the seam of `interface`."""
