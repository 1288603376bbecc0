"""Which replicas there are, how they are reached, and whether they can be trusted."""
