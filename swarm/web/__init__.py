"""What our web servers share: HTTP on trio, a page's files, requests of this machine alone. No torch."""
