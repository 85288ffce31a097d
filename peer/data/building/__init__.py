"""Building a data set of pages: documents into buckets by the hash of each, and buckets into pages."""
