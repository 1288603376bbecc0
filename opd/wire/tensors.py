"""Tensors as contiguous little-endian bytes: the encoder and decoder for every dtype of the contract.

Everything is vectorised in numpy: at K = 64 a token costs well below a microsecond each way. The number of bytes is
checked before anything is allocated; a wrong one raises `CorruptPayloadError`.

| dtype      | bytes per row of n     | array on the Python side                    |
|------------|------------------------|---------------------------------------------|
| f32        | 4 n                    | float32                                     |
| f16        | 2 n                    | float16                                     |
| bf16       | 2 n                    | uint16 (the bits; numpy has no bfloat16)    |
| u32        | 4 n                    | uint32                                      |
| u18        | 18 n bits, whole array packed, the last byte filled with zero bits | uint32 below 262,144 |
| u16_affine | 8 + 2 n                | float32                                     |
"""

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opd.errors import CorruptPayloadError
from opd.wire.checksum import Buffer
from opd.wire.v1 import teacher_pb2 as pb

U18_LIMIT = 1 << 18
"""The first id that does not fit into 18 bits."""

AFFINE_MINUS_INF = 65535
"""The code of -inf in a u16 affine row; finite values use 0 to 65534."""

# Four packed ids in nine bytes; numpy reads and writes the unaligned 64 bits at once.
_FOUR_IDS = np.dtype([("low", "<u8"), ("high", "u1")])
_GROUPS = 1 << 14
"""Groups of four ids that are converted at a time, so that temporaries stay in the cache."""
_U64 = np.uint64
_FIRST_ID, _SECOND_ID, _PAIR = _U64(0x3FFFF), _U64(0x3FFFF << 18), _U64((1 << 36) - 1)

_PLAIN: dict[int, np.dtype[Any]] = {
    pb.DTYPE_F32: np.dtype("<f4"),
    pb.DTYPE_F16: np.dtype("<f2"),
    pb.DTYPE_BF16: np.dtype("<u2"),
    pb.DTYPE_U32: np.dtype("<u4"),
}
_CODES: dict[str, pb.Dtype] = {
    "f32": pb.DTYPE_F32,
    "f16": pb.DTYPE_F16,
    "bf16": pb.DTYPE_BF16,
    "u32": pb.DTYPE_U32,
    "u18": pb.DTYPE_U18,
    "u16": pb.DTYPE_U16_AFFINE,
}
_NAMES = {code: name for name, code in _CODES.items()}


def to_half(values: NDArray[np.float32]) -> NDArray[np.float16]:
    """Round float32 to float16, to nearest even. Values beyond 65,504 become infinite; NaN stays NaN."""
    # numpy converts float16 one value at a time, 200 times slower than torch. Importing torch takes 1.6 s, so clients
    # that move no float16 should not have to.
    import torch

    half: NDArray[np.float16] = torch.from_numpy(np.require(values, np.float32, ["C", "W"])).half().numpy()
    return half


def to_single(values: NDArray[Any]) -> NDArray[np.float32]:
    """float16 to float32, exactly. Other dtypes are cast by numpy; float32 is returned as it is."""
    if values.dtype != np.float16:
        return values.astype(np.float32, copy=False)
    import torch

    single: NDArray[np.float32] = torch.from_numpy(np.require(values, None, ["C", "W"])).float().numpy()
    return single


def dtype_code(name: str) -> pb.Dtype:
    """The contract's code for "f32", "f16", "bf16", "u32", "u18" or "u16" (affine).

    Raises:
        ValueError: for any other name.
    """
    if name not in _CODES:
        raise ValueError(f"dtype must be one of {', '.join(_CODES)}, but it is {name!r}.")
    return _CODES[name]


def dtype_name(code: int) -> str:
    """The inverse of `dtype_code`; "" for an unknown or unspecified code."""
    return _NAMES.get(code, "")  # type: ignore[call-overload]


def byte_length(dtype: int, rows: int, cols: int) -> int:
    """Bytes of a [rows, cols] tensor, before compression.

    Raises:
        CorruptPayloadError: for an unknown dtype.
    """
    plain = _PLAIN.get(dtype)
    if plain is not None:
        return rows * cols * plain.itemsize
    if dtype == pb.DTYPE_U18:
        return (rows * cols * 18 + 7) // 8
    if dtype == pb.DTYPE_U16_AFFINE:
        return rows * (8 + 2 * cols)
    raise CorruptPayloadError(f"tensor dtype {dtype} is unknown; client and server differ in version.")


def encode_tensor(array: NDArray[Any], dtype: int) -> NDArray[np.uint8]:
    """The bytes of an array with one or two dimensions, as a flat uint8 array (a view if possible).

    bf16 takes either its bits as uint16, or float32, which is rounded to nearest even. In f16, values below -65,504
    become -inf.

    Raises:
        ValueError: if the array's dtype does not go with `dtype`, or an id does not fit into 18 bits.
    """
    if dtype == pb.DTYPE_U18:
        return pack_u18(array)
    if dtype == pb.DTYPE_U16_AFFINE:
        return encode_affine(array)
    plain = _PLAIN.get(dtype)
    if plain is None:
        raise ValueError(f"dtype must be a known element type, but it is {dtype}.")
    if dtype == pb.DTYPE_BF16 and array.dtype == np.float32:
        array = bf16_bits(array)
    # numpy would silently cast ids to floats or floats to ids.
    if (array.dtype.kind == "f") != (plain.kind == "f"):
        raise ValueError(f"an array of {array.dtype} cannot be sent as {dtype_name(dtype)}.")
    if dtype == pb.DTYPE_F16 and array.dtype == np.float32:
        array = to_half(array)
    with np.errstate(over="ignore"):
        data = np.ascontiguousarray(array, dtype=plain)
    return data.reshape(-1).view(np.uint8)


def decode_tensor(data: Buffer, dtype: int, rows: int, cols: int) -> NDArray[Any]:
    """The [rows, cols] array in `data`, with dtypes as in the module's table; read-only if it is a view.

    Raises:
        CorruptPayloadError: if the number of bytes does not match the shape.
    """
    raw = np.frombuffer(data, dtype=np.uint8)
    expected = byte_length(dtype, rows, cols)
    if len(raw) != expected:
        raise CorruptPayloadError(
            f"a [{rows}, {cols}] tensor of {dtype_name(dtype)} needs {expected} bytes, but {len(raw)} arrived."
        )
    if dtype == pb.DTYPE_U18:
        return unpack_u18(raw, rows * cols).reshape(rows, cols)
    if dtype == pb.DTYPE_U16_AFFINE:
        return decode_affine(raw, rows, cols)
    plain = _PLAIN[dtype]
    array = raw.view(plain).reshape(rows, cols)
    return array if sys.byteorder == "little" else array.astype(plain.newbyteorder("="))


def pack_u18(ids: NDArray[Any]) -> NDArray[np.uint8]:
    """Pack ids below 262,144 into 18 bits each, least significant bit first: four ids in nine bytes.

    Raises:
        ValueError: if an id does not fit.
    """
    flat = np.ascontiguousarray(ids, dtype="<u4").reshape(-1)
    if len(flat) and int(flat.max()) >= U18_LIMIT:
        raise ValueError(f"ids must be below {U18_LIMIT} to pack into 18 bits, but the largest is {int(flat.max())}.")
    count = len(flat)
    if count % 4:
        flat = np.concatenate([flat, np.zeros(-count % 4, "<u4")])
    pairs = flat.view("<u8")
    packed = np.empty(len(pairs) // 2, _FOUR_IDS)
    for at in range(0, len(packed), _GROUPS):
        # Two ids, side by side in 64 bits, move together into 36 bits; then two such pairs into 72.
        two = pairs[2 * at : 2 * (at + _GROUPS)]
        close = two >> _U64(14)
        close &= _SECOND_ID
        close |= two & _FIRST_ID
        part = packed[at : at + _GROUPS]
        part["low"] = close[1::2] << _U64(36) | close[::2]
        part["high"] = close[1::2] >> _U64(28)
    return packed.view(np.uint8)[: (count * 18 + 7) // 8]


def unpack_u18(data: NDArray[np.uint8], count: int) -> NDArray[np.uint32]:
    """The inverse of `pack_u18` for `count` ids from ceil(18 * count / 8) bytes."""
    groups = -(-count // 4)
    if len(data) < groups * 9:
        data = np.concatenate([data, np.zeros(groups * 9 - len(data), np.uint8)])
    packed = data.view(_FOUR_IDS)
    pairs = np.empty((groups, 2), "<u8")
    for at in range(0, groups, _GROUPS):
        # In pieces, so that temporaries stay in the cache.
        part = packed[at : at + _GROUPS]
        # One aligned copy, as it is read twice: in the packed data, consecutive values are nine bytes apart.
        low = np.ascontiguousarray(part["low"])
        close = pairs[at : at + _GROUPS]
        close[:, 0] = low & _PAIR
        close[:, 1] = low >> _U64(36) | part["high"].astype("<u8") << _U64(28)
        close[:] = close << _U64(14) & _SECOND_ID << _U64(14) | close & _FIRST_ID
    return pairs.reshape(-1).view("<u4")[:count].astype(np.uint32, copy=False)


def encode_affine(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Quantise [rows, cols] to 16 bits with a scale per row.

    A row is its offset (f32), its step (f32), then its codes (u16); value = offset + step * code. The
    error is at most half a step, (max - min) / 131,068 of the row's finite values, plus the rounding of f32. -inf is
    preserved.

    Raises:
        ValueError: for NaN or +inf.
    """
    table = np.ascontiguousarray(values, dtype=np.float32)
    rows, cols = table.shape
    # The extremes are finite if all values are, which is nearly always; the table need not be read again then.
    low, high = table.min(axis=1, initial=np.inf), table.max(axis=1, initial=-np.inf)
    impossible = None
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        impossible = table == -np.inf
        if not (np.isfinite(table) | impossible).all():
            raise ValueError("values must be finite or -inf to be quantised, but they hold NaN or +inf.")
        # -inf has a code of its own and must not widen the range of the others.
        low = np.where(impossible, np.inf, table).min(axis=1, initial=np.inf)
        table = np.where(impossible, 0, table)
    offset = np.where(np.isfinite(low), low, 0).astype(np.float32)
    step = (np.where(np.isfinite(high), high, 0) - offset).astype(np.float32) / np.float32(AFFINE_MINUS_INF - 1)
    codes = table - offset[:, None]
    # A constant row has step 0.
    codes /= np.where(step > 0, step, 1)[:, None]
    np.rint(codes, out=codes)
    np.clip(codes, 0, AFFINE_MINUS_INF - 1, out=codes)
    if impossible is not None:
        codes[impossible] = AFFINE_MINUS_INF
    packed = np.empty((rows, 8 + 2 * cols), np.uint8)
    packed[:, :4] = offset.astype("<f4").view(np.uint8).reshape(rows, 4)
    packed[:, 4:8] = step.astype("<f4").view(np.uint8).reshape(rows, 4)
    packed[:, 8:] = codes.astype("<u2").view(np.uint8).reshape(rows, 2 * cols)
    return packed.reshape(-1)


def decode_affine(data: NDArray[np.uint8], rows: int, cols: int) -> NDArray[np.float32]:
    """The inverse of `encode_affine`: [rows, cols] float32.

    Raises:
        CorruptPayloadError: if an offset or step is not finite, or a step is negative.
    """
    table = data.reshape(rows, 8 + 2 * cols)
    scale = np.ascontiguousarray(table[:, :8]).view("<f4")
    if not np.isfinite(scale).all() or (scale[:, 1] < 0).any():
        raise CorruptPayloadError("a quantised tensor has an offset or step that is not finite, or a negative step.")
    codes = np.ascontiguousarray(table[:, 8:]).view("<u2")
    # The code of -inf is beyond the row's range, so its value may overflow; it is replaced below.
    with np.errstate(over="ignore"):
        values = scale[:, :1] + scale[:, 1:] * codes
    values[codes == AFFINE_MINUS_INF] = -np.inf
    return values.astype(np.float32, copy=False)


def bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of float32 values rounded to bfloat16 (to nearest, ties to even); NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    # Adding just under half of the last kept bit, or exactly half if that bit is odd, carries if it must round up.
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def bf16_to_f32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The float32 values of bfloat16 bits, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
