"""Peers of one run that find each other on the network that they share, by multicast DNS."""
