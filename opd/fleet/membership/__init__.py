"""Which replicas exist, how they are reached, and whether they can be trusted."""
