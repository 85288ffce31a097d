"""One node at one head: the parts that live until it leaves it."""
