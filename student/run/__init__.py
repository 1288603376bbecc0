"""A run on disk and on screen: its folder, checkpoints, interrupts, costs and metrics."""
