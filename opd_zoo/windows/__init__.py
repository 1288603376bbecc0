"""Methods that choose which tokens of a response are sampled and learnt from."""
