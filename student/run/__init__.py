"""A run on disk and on screen: its folder, checkpoints, signals, costs and metrics."""
