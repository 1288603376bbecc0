"""CRC32C checksums, and zstd with a size limit: the decompressed size is checked before decompression."""

from typing import TypeAlias

import crc32c as _crc32c
import zstandard

from opd.errors import CorruptPayloadError
from opd.wire.v1 import teacher_pb2 as pb

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Contiguous bytes."""

ZSTD_LEVEL = 1
"""The fastest level; higher ones compress log-probs and ids hardly any better."""


def crc32c(data: Buffer, start: int = 0) -> int:
    """CRC32C (Castagnoli) of `data`, continuing from `start`, the checksum of the bytes before it."""
    return int(_crc32c.crc32c(data, start))


def compress(data: Buffer) -> bytes:
    """One zstd frame with its content size in the header."""
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True).compress(data)


def decompress(data: Buffer, expected: int) -> bytes:
    """Decompress one zstd frame to exactly `expected` bytes.

    Raises:
        CorruptPayloadError: if the frame is damaged or announces another size, in which case nothing is decompressed.
    """
    try:
        # Checked before decompression: a frame of kilobytes may announce gigabytes.
        size = zstandard.get_frame_parameters(data).content_size
        if size != expected:
            raise CorruptPayloadError(f"a compressed tensor unpacks to {size} bytes, but {expected} were announced.")
        content = zstandard.ZstdDecompressor().decompress(data, max_output_size=expected, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptPayloadError(f"a compressed tensor is damaged: {error}.") from error
    # The frame may hold less than it announces.
    if len(content) != expected:
        raise CorruptPayloadError(f"a compressed tensor holds {len(content)} bytes, but {expected} were announced.")
    return content


def unpack(data: Buffer, compression: int, expected: int) -> Buffer:
    """Undo the `compression` (a code of the contract) of a tensor with `expected` bytes.

    Raises:
        CorruptPayloadError: if the compression is unknown or the frame is damaged.
    """
    if compression == pb.COMPRESSION_NONE:
        return data
    if compression == pb.COMPRESSION_ZSTD:
        return decompress(data, expected)
    raise CorruptPayloadError(f"tensor compression {compression} is unknown; client and server differ in version.")
