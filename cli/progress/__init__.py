"""What the events of one or several peers add up to; `cli.views` draws it."""
