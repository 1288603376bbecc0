"""Methods that choose which turns of an episode are sampled and learnt from."""
