"""The state that a checkpoint holds, as tensors and JSON."""
