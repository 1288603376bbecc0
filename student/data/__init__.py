"""What flows through the loop: plans, rows, batches and the random streams that make them."""
