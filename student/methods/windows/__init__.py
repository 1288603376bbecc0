"""Methods that choose how much of a response is trained on."""
