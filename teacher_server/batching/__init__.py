"""From admitted requests to batches on the engine."""
