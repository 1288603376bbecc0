"""What encoding costs per token, each way: JSON, a message per position, and the codec of this project.

    python benchmarks/wire_codec.py               # about a minute
    python benchmarks/wire_codec.py --json out.json

T positions of K ids with log-probs. "each way" is the sender's work from numpy arrays to bytes, and the receiver's from
bytes to numpy arrays; ours includes checksums and, on the way in, every validation of `opd.wire.checks`. The message
per position has the shape of the gRPC front ends of vLLM and SGLang: repeated float and repeated uint32 per token. It
is CPU time of one thread, the least of interleaved rounds, so that the ratios hold on a busy machine too.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from opd.wire.bounds import RequestBounds
from opd.wire.checksum import crc32c
from opd.wire.decoder import ScoreStreamDecoder
from opd.wire.encoder import chunk_messages, encode_scores
from opd.wire.request import token_bytes
from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem, Scores
from opd.wire.v1 import teacher_pb2 as pb

VOCAB = 151_936


def make_scores(rows: int, k: int) -> tuple[ScoreItem, Scores]:
    """Scores like a language model's: Zipf-like tails, mixed temperatures, random ids."""
    rng = np.random.default_rng(0)
    raw = -np.log(np.arange(1, k + 1)) * rng.uniform(1.0, 3.0, (rows, 1)) + rng.normal(0, 0.3, (rows, k))
    values = -np.sort(-raw, axis=1)
    values -= np.log(np.exp(values).sum(axis=1, keepdims=True) * 1.05)
    ids = rng.integers(0, VOCAB // k, (rows, k)) + np.arange(k) * (VOCAB // k)
    ids = rng.permuted(ids, axis=1).astype(np.uint32)
    tail = np.log(np.maximum(1 - np.exp(values).sum(axis=1), 1e-9))
    token_ids = np.concatenate([[1], ids[:, 0]]).astype(np.uint32)
    scores = Scores(
        sampled=values[:, 0].astype(np.float32),
        values=values.astype(np.float32),
        ids=ids,
        log_tail=tail.astype(np.float32),
    )
    return ScoreItem(token_ids, 1), scores


def ours(item: ScoreItem, scores: Scores, k: int, dtype: str, zstd: bool) -> tuple[Any, Any]:
    """Encoder and decoder of this project."""
    spec = PayloadSpec.topk(k, dtype)
    bounds = RequestBounds("t", VOCAB, frozenset(PayloadKind), True, 1 << 20, 1024, 1, 1 << 20, 1 << 30)
    checksum = crc32c(token_bytes(item.token_ids))
    header = pb.ScoreResponse(header=pb.ScoreHeader(sequence_count=1)).SerializeToString()
    trailer = pb.ScoreResponse(trailer=pb.ScoreTrailer()).SerializeToString()

    def encode() -> list[bytes]:
        encoded = encode_scores(scores, spec, item.response_length, vocab_size=VOCAB, zstd=zstd)
        messages = [encoded.header(0, checksum)]
        messages += [pb.ScoreResponse(chunk=chunk) for chunk in chunk_messages(encoded.buffers, 512 * 1024)]
        return [header, *(message.SerializeToString() for message in messages), trailer]

    def decode(data: list[bytes]) -> Any:
        decoder = ScoreStreamDecoder([item], spec, bounds)
        for message in data:
            decoder.feed(pb.ScoreResponse.FromString(message))
        return decoder.finish()

    return encode, decode


def per_position(scores: Scores) -> tuple[Any, Any]:
    """A message per position with repeated numbers."""
    file = descriptor_pb2.FileDescriptorProto(name="p.proto", package="p", syntax="proto3")
    position, answer = file.message_type.add(name="Position"), file.message_type.add(name="Answer")
    kinds = descriptor_pb2.FieldDescriptorProto
    position.field.add(name="values", number=1, type=kinds.TYPE_FLOAT, label=3)
    position.field.add(name="ids", number=2, type=kinds.TYPE_UINT32, label=3)
    answer.field.add(name="positions", number=1, type=kinds.TYPE_MESSAGE, type_name=".p.Position", label=3)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    message_class: Any = message_factory.GetMessageClass(pool.FindMessageTypeByName("p.Answer"))

    def encode() -> list[bytes]:
        message = message_class()
        for values, ids in zip(scores.values.tolist(), scores.ids.tolist(), strict=True):
            message.positions.add(values=values, ids=ids)
        return [message.SerializeToString()]

    def decode(data: list[bytes]) -> Any:
        message = message_class.FromString(data[0])
        values = np.array([list(p.values) for p in message.positions], np.float32)
        return values, np.array([list(p.ids) for p in message.positions], np.uint32)

    return encode, decode


def as_json(scores: Scores) -> tuple[Any, Any]:
    """Nested lists, as the HTTP servers answer."""

    def encode() -> list[bytes]:
        return [json.dumps({"values": scores.values.tolist(), "ids": scores.ids.tolist()}).encode()]

    def decode(data: list[bytes]) -> Any:
        parsed = json.loads(data[0])
        return np.array(parsed["values"], np.float32), np.array(parsed["ids"], np.uint32)

    return encode, decode


def arrow(scores: Scores) -> tuple[Any, Any] | None:
    """Arrow IPC, the encoding of Arrow Flight; None where pyarrow is not installed."""
    try:
        import pyarrow as pa
    except ImportError:
        return None

    def encode() -> list[bytes]:
        batch = pa.record_batch(
            [pa.array(scores.values.ravel()), pa.array(scores.ids.ravel())], names=["values", "ids"]
        )
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return [sink.getvalue().to_pybytes()]

    def decode(data: list[bytes]) -> Any:
        batch = pa.ipc.open_stream(data[0]).read_next_batch()
        k = scores.values.shape[1]
        return batch.column(0).to_numpy().reshape(-1, k), batch.column(1).to_numpy().reshape(-1, k)

    return encode, decode


def seconds(function: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    started = time.process_time()
    result = function(*args)
    return time.process_time() - started, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    item, scores = make_scores(args.rows, args.k)
    pairs: dict[str, tuple[Any, Any] | None] = {
        "JSON lists": as_json(scores),
        "message per position": per_position(scores),
        "Arrow IPC, f32 + u32, unchecked": arrow(scores),
        "ours, f32 + u18": ours(item, scores, args.k, "f32", False),
        "ours, f16 + u18 (default)": ours(item, scores, args.k, "f16", False),
        "ours, u16 affine + u18": ours(item, scores, args.k, "u16", False),
        "ours, f16 + u18, zstd": ours(item, scores, args.k, "f16", True),
    }
    times: dict[str, list[tuple[float, float]]] = {}
    sizes: dict[str, int] = {}
    for _ in range(args.rounds):
        for name, pair in pairs.items():
            if pair is None:
                continue
            out, data = seconds(pair[0])
            back, _ = seconds(pair[1], data)
            times.setdefault(name, []).append((out, back))
            sizes[name] = sum(len(part) for part in data)
    base = min(sum(round_) for round_ in times["ours, f16 + u18 (default)"])
    table = []
    title = f"T = {args.rows}, K = {args.k}"
    print(f"{title:34} {'B/token':>8} {'encode us':>10} {'decode us':>10} {'x ours':>7}")
    for name, rounds in times.items():
        out, back = (min(r[i] for r in rounds) / args.rows * 1e6 for i in range(2))
        ratio = min(sum(r) for r in rounds) / base
        table.append(
            {"name": name, "bytes": sizes[name] / args.rows, "encode_us": out, "decode_us": back, "ratio": ratio}
        )
        print(f"{name:34} {sizes[name] / args.rows:8.1f} {out:10.2f} {back:10.2f} {ratio:7.1f}")
    if args.json:
        args.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
