"""Writes the golden files of this schema version: python tests/opd/wire/make_golden.py.

Run it once per new schema version and commit the result; never overwrite a version that was released, because the
files are the promise that old clients and servers are still understood.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np

from opd.wire.bounds import RequestBounds
from opd.wire.checksum import crc32c
from opd.wire.encoder import chunk_messages, encode_scores, timings_message
from opd.wire.fingerprint import head_hash
from opd.wire.head import encode_head
from opd.wire.request import build_score_request, token_bytes
from opd.wire.tensors import bf16_bits
from opd.wire.types import Head, PayloadKind, PayloadSpec, Timings
from opd.wire.v1 import admin_pb2
from opd.wire.v1 import teacher_pb2 as pb

VERSION = "v1"
SPECS = {
    "sampled": PayloadSpec.sampled(),
    "topk_f16": PayloadSpec.topk(4),
    "topk_u16": PayloadSpec.topk(4, "u16"),
    "gather_f32": PayloadSpec.gather(3, "f32"),
    "hidden_bf16": PayloadSpec.hidden(),
    "full": PayloadSpec.full(),
}


def bounds(vocab: int, hidden: int) -> RequestBounds:
    """Bounds that all golden requests respect."""
    return RequestBounds("t", vocab, frozenset(PayloadKind), True, 64, vocab, 4, 256, 1 << 20, hidden)


def head() -> Head:
    """The head of the golden stream."""
    weight = bf16_bits(np.linspace(-1, 1, 40, dtype=np.float32).reshape(10, 4))
    made = Head(weight, bf16_bits(np.linspace(0, 1, 10, dtype=np.float32)), "bf16", 0.5, 30.0, "")
    return Head(made.weight, made.bias, made.dtype, made.logit_scale, made.soft_cap, head_hash(made))


def stream(cases: list[Any], spec: PayloadSpec, *, zstd: bool) -> list[pb.ScoreResponse]:
    """A score stream as a server of this version sends it."""
    out = [pb.ScoreResponse(header=pb.ScoreHeader(request_id="golden", weights_hash="w" * 64, sequence_count=2))]
    for index, case in enumerate(cases):
        encoded = encode_scores(case.scores, spec, case.item.response_length, vocab_size=300, hidden_size=16, zstd=zstd)
        out.append(encoded.header(index, crc32c(token_bytes(case.item.token_ids))))
        out += [pb.ScoreResponse(chunk=chunk) for chunk in chunk_messages(encoded.buffers, 64)]
    timings = timings_message(Timings(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 2.1))
    out.append(pb.ScoreResponse(trailer=pb.ScoreTrailer(timings=timings, model_tokens=20, scored_tokens=14)))
    return out


def join(messages: list[Any]) -> bytes:
    """Messages, each after its length as four little-endian bytes."""
    parts = [message.SerializeToString(deterministic=True) for message in messages]
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def main(make_case: Any, folder: Path) -> None:
    """Write all files of `VERSION` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, spec in SPECS.items():
        cases = [make_case(spec, seed=seed) for seed in (1, 2)]
        request = build_score_request(
            [case.item for case in cases],
            spec,
            teacher="t",
            request_id="golden",
            temperature=0.5,
            expected_weights_hash="w" * 64,
            accept_zstd=True,
            chunk_bytes=65536,
            client="c",
        )
        (folder / f"request_{name}.bin").write_bytes(join([request]))
        (folder / f"scores_{name}.bin").write_bytes(join(stream(cases, spec, zstd=name == "full")))
        arrays = {}
        for index, case in enumerate(cases):
            arrays[f"{index}.token_ids"] = case.item.token_ids
            arrays[f"{index}.prompt_length"] = np.array(case.item.prompt_length)
            if case.item.gather_ids is not None:
                arrays[f"{index}.gather_ids"] = case.item.gather_ids
            for field in ("sampled", "values", "ids", "log_tail", "hidden", "logits"):
                if getattr(case.scores, field) is not None:
                    arrays[f"{index}.{field}"] = getattr(case.scores, field)
        np.savez_compressed(folder / f"arrays_{name}.npz", **arrays)
    (folder / "head.bin").write_bytes(join(list(encode_head(head(), 64))))
    for module in (pb, admin_pb2):
        stem = Path(module.DESCRIPTOR.name).stem
        (folder / f"{stem}.desc").write_bytes(module.DESCRIPTOR.serialized_pb)


if __name__ == "__main__":
    here = Path(__file__).parent
    spec_ = importlib.util.spec_from_file_location("wire_conftest", here / "conftest.py")
    conftest = importlib.util.module_from_spec(spec_)
    sys.modules["wire_conftest"] = conftest
    spec_.loader.exec_module(conftest)
    main(conftest.make_case, here / "golden" / VERSION)
