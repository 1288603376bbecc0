"""The student's weights: loading, adapters, sharding, ranks."""
