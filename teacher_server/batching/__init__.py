"""From admitted requests to batches on the engine: admission control, the fair queue, and the engine's thread."""
