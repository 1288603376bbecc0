"""Methods that choose how much of a response is sampled and trained on."""
