"""Confinement: limits on a process of ours after a fault in a library has given it to an attacker."""
