"""The deviation of a batch of rewards."""

import math
from collections.abc import Sequence


def deviation(values: Sequence[float], ddof: int) -> float:
    """The standard deviation; 0 for too few values, and exactly 0 where all are equal."""
    # Set explicitly: the rounded mean of three times 0.1 is not 0.1, and dividing by the rest would blow values up.
    if len(values) <= ddof or len(set(values)) == 1:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - ddof))
