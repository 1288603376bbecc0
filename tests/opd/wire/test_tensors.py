"""Tensor codecs: exact round trips, bounded quantisation, refused lengths."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from opd.errors import CorruptPayloadError
from opd.wire.tensors import (
    AFFINE_MINUS_INF,
    U18_LIMIT,
    bf16_bits,
    bf16_to_f32,
    byte_length,
    decode_tensor,
    dtype_code,
    dtype_name,
    encode_tensor,
    pack_u18,
    unpack_u18,
)
from opd.wire.v1 import teacher_pb2 as pb

shapes = st.tuples(st.integers(1, 9), st.integers(1, 9))


@given(hnp.arrays(np.uint32, shapes, elements=st.integers(0, U18_LIMIT - 1)))
@settings(max_examples=100, deadline=None)
def test_u18_round_trips_in_the_announced_number_of_bytes(ids: np.ndarray) -> None:
    data = encode_tensor(ids, pb.DTYPE_U18)
    assert len(data) == byte_length(pb.DTYPE_U18, *ids.shape)
    assert (decode_tensor(data.data, pb.DTYPE_U18, *ids.shape) == ids).all()


def test_u18_is_least_significant_bit_first() -> None:
    assert pack_u18(np.array([1], np.uint32)).tobytes() == b"\x01\x00\x00"
    bits = int.from_bytes(pack_u18(np.array([3, 5, 7, 11, 13], np.uint32)).tobytes(), "little")
    assert [bits >> 18 * i & (U18_LIMIT - 1) for i in range(5)] == [3, 5, 7, 11, 13]
    assert unpack_u18(np.frombuffer(bytes(12), np.uint8), 5).tolist() == [0] * 5


def test_u18_refuses_an_id_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="262144"):
        pack_u18(np.array([U18_LIMIT]))


@given(hnp.arrays(np.float32, shapes, elements=st.floats(-60, 0, width=32) | st.just(-np.inf)))
@settings(max_examples=100, deadline=None)
def test_affine_error_is_at_most_half_a_step_and_minus_inf_is_kept(values: np.ndarray) -> None:
    data = encode_tensor(values, pb.DTYPE_U16_AFFINE)
    assert len(data) == byte_length(pb.DTYPE_U16_AFFINE, *values.shape)
    back = decode_tensor(data.data, pb.DTYPE_U16_AFFINE, *values.shape)
    assert ((back == -np.inf) == (values == -np.inf)).all()
    finite = np.isfinite(values)
    spread = np.where(finite, values, 0).max(axis=1) - np.where(finite, values, 0).min(axis=1)
    bound = spread / (2 * (AFFINE_MINUS_INF - 1)) + 2e-5
    gap = np.abs(np.where(finite, back, 0) - np.where(finite, values, 0))
    assert (gap <= bound[:, None]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_affine_refuses_nan_and_plus_infinity(bad: float) -> None:
    with pytest.raises(ValueError, match="NaN"):
        encode_tensor(np.array([[0.0, bad]], np.float32), pb.DTYPE_U16_AFFINE)


@pytest.mark.parametrize("head", [(np.nan, 1.0), (0.0, np.inf), (0.0, -1.0)])
def test_affine_refuses_a_lying_offset_or_step(head: tuple[float, float]) -> None:
    data = np.array(head, "<f4").tobytes() + b"\x01\x00"
    with pytest.raises(CorruptPayloadError, match="offset or step"):
        decode_tensor(data, pb.DTYPE_U16_AFFINE, 1, 1)


@given(hnp.arrays(np.float32, shapes, elements=st.floats(width=32, allow_nan=False)))
@settings(max_examples=100, deadline=None)
def test_bf16_rounds_as_torch_does(values: np.ndarray) -> None:
    import torch

    expected = torch.from_numpy(values.copy()).to(torch.bfloat16)
    assert (bf16_bits(values) == expected.view(torch.uint16).numpy()).all()
    assert (bf16_to_f32(bf16_bits(values)) == expected.float().numpy()).all()


def test_bf16_keeps_nan() -> None:
    assert np.isnan(bf16_to_f32(bf16_bits(np.array([np.nan], np.float32)))).all()


@pytest.mark.parametrize(("name", "kind"), [("f32", "<f4"), ("f16", "<f2"), ("u32", "<u4"), ("bf16", "<u2")])
def test_plain_types_are_little_endian_bytes_and_round_trip(name: str, kind: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(kind)
    data = encode_tensor(array, dtype_code(name))
    assert data.tobytes() == array.tobytes()
    assert (decode_tensor(data.data, dtype_code(name), 2, 3) == array).all()
    assert dtype_name(dtype_code(name)) == name


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "u32", "u18", "u16"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_wrong_number_of_bytes_is_refused(name: str, change: int) -> None:
    code = dtype_code(name)
    data = bytes(byte_length(code, 3, 5) + change)
    with pytest.raises(CorruptPayloadError, match="needs"):
        decode_tensor(data, code, 3, 5)


def test_unknown_types_are_refused() -> None:
    with pytest.raises(CorruptPayloadError, match="unknown"):
        decode_tensor(b"", 99, 1, 1)
    with pytest.raises(ValueError, match="dtype"):
        dtype_code("f64")
    with pytest.raises(ValueError, match="cannot be sent as"):
        encode_tensor(np.zeros((1, 1), np.int64), pb.DTYPE_F32)
