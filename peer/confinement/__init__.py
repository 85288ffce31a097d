"""What a process of ours can still do after a fault in a library has given it to an attacker."""
