"""What a checkpoint says of texts: special tokens, chat templates, and where a text ends."""
