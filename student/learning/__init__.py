"""The update: the student model, the terms of its objective, and the ranks that share it."""
