"""The data that flows through the loop: plans, rows, outcomes and micro-batches, and the rows' random streams."""
