"""Puts the chunks of a stream together."""

import numpy as np

from opd.errors import CorruptPayloadError
from opd.wire.v1 import teacher_pb2 as pb


class Assembly:
    """Bytes of an announced size, which chunks fill from the first to the last.

    They are allocated at once, so that chunks are copied only once: the caller bounds the size.

    Args:
        what: what the bytes are, for errors.
        size: number of bytes.

    Attributes:
        buffer: the bytes.
        filled: number of bytes that have arrived.
    """

    def __init__(self, what: str, size: int) -> None:
        self._what = what
        self.buffer = np.empty(size, np.uint8).data
        self.filled = 0

    @property
    def complete(self) -> bool:
        """Whether all bytes have arrived."""
        return self.filled == len(self.buffer)

    def add(self, chunk: pb.Chunk) -> None:
        """Take the next chunk.

        Raises:
            CorruptPayloadError: if it does not continue what has arrived. Empty chunks are refused too: a stream of
                them could go on forever, and no time limit between messages would end it.
        """
        data, end = chunk.data, self.filled + len(chunk.data)
        if chunk.offset != self.filled or not data or end > len(self.buffer):
            raise CorruptPayloadError(
                f"a chunk of {len(data)} bytes at offset {chunk.offset} does not continue {self._what} of which "
                f"{self.filled} of {len(self.buffer)} bytes have arrived."
            )
        self.buffer[self.filled : end] = data
        self.filled = end
