"""CRC32C of tensor bytes, and bounded zstd: the length after decompression is known before it starts."""

from typing import TypeAlias

import crc32c as _crc32c
import zstandard

from opd.errors import CorruptPayloadError
from opd.wire.v1 import teacher_pb2 as pb

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Contiguous bytes."""

ZSTD_LEVEL = 1
"""The fastest level: log-probs and ids compress little more at higher ones."""


def crc32c(data: Buffer, start: int = 0) -> int:
    """CRC32C (Castagnoli) of `data`, continuing from `start`, the checksum of the bytes before."""
    return int(_crc32c.crc32c(data, start))


def compress(data: Buffer) -> bytes:
    """One zstd frame that names its content size."""
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True).compress(data)


def decompress(data: Buffer, expected: int) -> bytes:
    """Decompress one zstd frame to exactly `expected` bytes.

    Raises:
        CorruptPayloadError: when the frame is damaged or names another size; nothing is allocated in that case.
    """
    try:
        # Before anything is unpacked: a frame of kilobytes may claim gigabytes.
        size = zstandard.get_frame_parameters(data).content_size
        if size != expected:
            raise CorruptPayloadError(f"a compressed tensor unpacks to {size} bytes, but {expected} were announced.")
        content = zstandard.ZstdDecompressor().decompress(data, max_output_size=expected, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptPayloadError(f"a compressed tensor is damaged: {error}.") from error
    # What the frame claims and what it holds are two things.
    if len(content) != expected:
        raise CorruptPayloadError(f"a compressed tensor holds {len(content)} bytes, but {expected} were announced.")
    return content


def unpack(data: Buffer, compression: int, expected: int) -> Buffer:
    """Undo `compression` (of the contract) of a tensor with `expected` bytes.

    Raises:
        CorruptPayloadError: for an unknown compression or a damaged frame.
    """
    if compression == pb.COMPRESSION_NONE:
        return data
    if compression == pb.COMPRESSION_ZSTD:
        return decompress(data, expected)
    raise CorruptPayloadError(f"tensor compression {compression} is unknown; client and server differ in version.")
