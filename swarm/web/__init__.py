"""Common parts of our web servers: HTTP on trio, a page's files, requests of this machine alone. No torch."""
