"""A device that teachers share: whose turn it is, and how fast it serves each of them."""

import threading
from collections import deque

RATE_DECAY = 0.8


class DeviceTurn:
    """A first-come-first-served lock, by which the teachers on a device take turns.

    `threading.Lock` guarantees no order: a busy teacher that releases it and takes it again could starve the others.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: deque[object] = deque()

    def __enter__(self) -> None:
        ticket = object()
        with self._condition:
            self._waiting.append(ticket)  # the holder's ticket stays in front until it leaves
            self._condition.wait_for(lambda: self._waiting[0] is ticket)

    def __exit__(self, *_: object) -> None:
        with self._condition:
            self._waiting.popleft()
            self._condition.notify_all()


class Rate:
    """The throughput of an engine, in tokens per second, as learnt from its batches.

    Args:
        max_tokens: most tokens in a batch.
        max_sequences: most sequences in a batch.

    Attributes:
        recent: the recent throughput; 0.0 before the first batch.
        admission: the throughput by which calls may be refused; an upper estimate until a batch was at least half full.
    """

    def __init__(self, max_tokens: int, max_sequences: int) -> None:
        self.recent = 0.0
        self.admission = 0.0
        self._max_tokens = max_tokens
        self._max_sequences = max_sequences
        self._seen_full = False

    def learn(self, sequences: int, tokens: int, seconds: float) -> None:
        """Average the throughput over batches at least half full, in tokens or sequences; others count only if faster.

        Small batches leave the device partly idle: by their throughput, admission would refuse what a full batch does
        in time.
        """
        rate = tokens / max(seconds, 1e-6)
        full = 2 * tokens >= self._max_tokens or 2 * sequences >= self._max_sequences
        if full and self._seen_full:
            self.recent = RATE_DECAY * self.recent + (1 - RATE_DECAY) * rate
        else:
            self.recent = rate if full else max(rate, self.recent)
        self._seen_full = self._seen_full or full
        # Until a batch was nearly full, a full one might, for all that is known, take no longer than this one did.
        most = max(self.admission, self._max_tokens / max(seconds, 1e-6))
        self.admission = self.recent if self._seen_full else most
