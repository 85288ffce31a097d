"""Building a data set of pages in two processes: a confined one reads files and tokenizes, the parent packs pages."""
