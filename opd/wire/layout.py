"""Which tensors carry a payload, in which order and shape: the table that encoder and decoder share."""

from dataclasses import dataclass

from opd.wire.tensors import U18_LIMIT, dtype_code
from opd.wire.types import PayloadKind, PayloadSpec
from opd.wire.v1 import teacher_pb2 as pb


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A tensor of a sequence: its role and columns, the dtype it is sent in, and the dtypes that a reader accepts."""

    role: pb.TensorRole
    cols: int
    dtype: pb.Dtype
    accepted: frozenset[int]


def layout_of(spec: PayloadSpec, vocab_size: int, hidden_size: int) -> list[TensorLayout]:
    """The tensors of one sequence, in the order of the wire.

    A server may send values as f32 if the dtype that was asked for would lose too much, so readers accept both. Ids
    travel as u18 if the vocabulary allows, else as u32; readers accept either.
    """
    f32 = pb.DTYPE_F32
    if spec.kind is PayloadKind.HIDDEN:
        return [_one(pb.TENSOR_ROLE_HIDDEN, hidden_size, dtype_code(spec.value_dtype))]
    if spec.kind is PayloadKind.FULL:
        return [_one(pb.TENSOR_ROLE_LOGITS, vocab_size, f32)]
    tensors = [_one(pb.TENSOR_ROLE_SAMPLED, 1, f32)]
    if spec.kind is PayloadKind.SAMPLED:
        return tensors
    wanted = dtype_code(spec.value_dtype)
    tensors.append(TensorLayout(pb.TENSOR_ROLE_VALUES, spec.k, wanted, frozenset({int(wanted), int(f32)})))
    if spec.kind is PayloadKind.TOPK:
        ids = pb.DTYPE_U18 if vocab_size <= U18_LIMIT else pb.DTYPE_U32
        accepted = frozenset({int(pb.DTYPE_U18), int(pb.DTYPE_U32)})
        tensors.append(TensorLayout(pb.TENSOR_ROLE_IDS, spec.k, ids, accepted))
    return [*tensors, _one(pb.TENSOR_ROLE_LOG_TAIL, 1, f32)]


def _one(role: pb.TensorRole, cols: int, dtype: pb.Dtype) -> TensorLayout:
    return TensorLayout(role, cols, dtype, frozenset({int(dtype)}))
