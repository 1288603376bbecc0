"""The output head on the wire: sent once, in chunks, and checked against its content hash on arrival."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opd.errors import CorruptPayloadError
from opd.wire.assembly import Assembly
from opd.wire.checksum import crc32c
from opd.wire.encoder import chunk_messages
from opd.wire.fingerprint import head_hash
from opd.wire.tensors import byte_length, decode_tensor, dtype_code, dtype_name, encode_tensor
from opd.wire.types import Head
from opd.wire.v1 import teacher_pb2 as pb

MAX_HEAD_BYTES = 64 << 30
"""Largest head that is accepted: 1,048,576 rows of 16,384 columns in f32."""

_HEAD_DTYPES = (pb.DTYPE_F32, pb.DTYPE_F16, pb.DTYPE_BF16)


def head_info(head: Head) -> pb.HeadInfo:
    """The contract's description of a head."""
    return pb.HeadInfo(
        hash=head.hash,
        hidden_size=head.weight.shape[1],
        logit_scale=head.logit_scale,
        soft_cap=head.soft_cap,
        dtype=dtype_code(head.dtype),
        has_bias=head.bias is not None,
    )


def encode_head(head: Head, chunk_bytes: int) -> Iterator[pb.GetHeadResponse]:
    """The messages of a head stream: a header, then chunks of weight and bias, built one at a time."""
    dtype = dtype_code(head.dtype)
    arrays: list[tuple[pb.TensorRole, NDArray[Any]]] = [(pb.TENSOR_ROLE_HEAD_WEIGHT, head.weight)]
    if head.bias is not None:
        arrays.append((pb.TENSOR_ROLE_HEAD_BIAS, head.bias.reshape(-1, 1)))
    tensors, buffers = [], []
    for role, array in arrays:
        # Encoded as a whole, because the header, which is sent first, contains the checksum of all bytes.
        data = encode_tensor(array, dtype).data
        buffers.append(data)
        tensors.append(
            pb.TensorSpec(
                role=role,
                dtype=dtype,
                rows=array.shape[0],
                cols=array.shape[1],
                byte_length=len(data),
                compression=pb.COMPRESSION_NONE,
                crc32c=crc32c(data),
            )
        )
    yield pb.GetHeadResponse(header=pb.HeadHeader(head=head_info(head), tensors=tensors))
    for chunk in chunk_messages(buffers, chunk_bytes):
        yield pb.GetHeadResponse(chunk=chunk)


class HeadStreamDecoder:
    """Assembles a head stream.

    Args:
        expected_hash: content hash the head must have, normally the one from `Describe`; "" for any.
    """

    def __init__(self, expected_hash: str = "") -> None:
        self._expected_hash = expected_hash
        self._header: pb.HeadHeader | None = None
        self._assembly = Assembly("an output head", 0)

    def feed(self, message: pb.GetHeadResponse) -> None:
        """Take a message of the stream.

        Raises:
            CorruptPayloadError: on any violation of the contract.
        """
        kind = message.WhichOneof("message")
        if kind == "header" and self._header is None:
            self._check_header(message.header)
            self._header = message.header
            size = sum(tensor.byte_length for tensor in message.header.tensors)
            self._assembly = Assembly("an output head", size)  # bounded by the check
        elif kind == "chunk" and self._header is not None:
            self._assembly.add(message.chunk)
        else:
            raise CorruptPayloadError(f"the head stream holds {kind or 'an empty message'} where it does not belong.")

    def finish(self) -> Head:
        """The head, after its hash is recomputed from what arrived.

        Raises:
            CorruptPayloadError: if bytes are missing, or a checksum or the content hash does not match.
        """
        if self._header is None or not self._assembly.complete:
            size = len(self._assembly.buffer)
            raise CorruptPayloadError(f"the head stream ended after {self._assembly.filled} of {size} bytes.")
        info = self._header.head
        arrays, start = [], 0
        for tensor in self._header.tensors:
            data = self._assembly.buffer[start : start + tensor.byte_length]
            start += tensor.byte_length
            if crc32c(data) != tensor.crc32c:
                raise CorruptPayloadError("the checksum of the head does not match; ask again.")
            arrays.append(decode_tensor(data, tensor.dtype, tensor.rows, tensor.cols))
        bias = arrays[1][:, 0] if info.has_bias else None
        head = Head(arrays[0], bias, dtype_name(info.dtype), info.logit_scale, info.soft_cap, info.hash)
        # The checksums protect the transport; this finds a server that sends another head than it describes.
        if head_hash(head) != info.hash:
            raise CorruptPayloadError(
                f"the head that arrived does not have its announced hash {info.hash!r}; the server sent another head."
            )
        return head

    def _check_header(self, header: pb.HeadHeader) -> None:
        info = header.head
        if self._expected_hash and info.hash != self._expected_hash:
            raise CorruptPayloadError(f"the head has hash {info.hash!r}, but {self._expected_hash!r} was asked for.")
        if info.dtype not in _HEAD_DTYPES or not np.isfinite([info.logit_scale, info.soft_cap]).all():
            raise CorruptPayloadError(
                f"the head has dtype {info.dtype}, scale {info.logit_scale} and soft-cap {info.soft_cap}, of which one "
                "is not valid."
            )
        roles = [pb.TENSOR_ROLE_HEAD_WEIGHT] + [pb.TENSOR_ROLE_HEAD_BIAS] * info.has_bias
        if [tensor.role for tensor in header.tensors] != roles:
            raise CorruptPayloadError(
                "the head's tensors must be its weight and, if it has one, its bias, but they are others."
            )
        rows = header.tensors[0].rows
        for tensor, cols in zip(header.tensors, (info.hidden_size, 1), strict=False):
            size = byte_length(info.dtype, tensor.rows, tensor.cols)
            # The sizes must follow from the head's own figures. A tensor of size 0 would make the stream complete
            # before its first chunk.
            plain = tensor.compression == pb.COMPRESSION_NONE and tensor.dtype == info.dtype
            if not plain or tensor.rows != rows or tensor.cols != cols or tensor.byte_length != size or not size:
                raise CorruptPayloadError(
                    "a tensor of the head has another shape, dtype or size than the head's header announces."
                )
        if sum(tensor.byte_length for tensor in header.tensors) > MAX_HEAD_BYTES:
            raise CorruptPayloadError(f"the head has more than {MAX_HEAD_BYTES} bytes, the most that is accepted.")
