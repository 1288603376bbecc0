"""How far apart honest replicas of one teacher are on the rows that compare them, and how far another model is.

    python benchmarks/fleet_agreement.py                     # builds the smallest tiny world, some minutes
    python benchmarks/fleet_agreement.py --model FOLDER      # any causal LM, from float32 weights

Every variant scores check rows (32 response tokens of random ids, as replicas are compared before they serve) and live
rows (the model's own samples, as cross-scoring compares them) and is compared with the float32 engine that scores each
row alone on one thread. Printed per variant: median, 95th percentile and largest of max |dlogp| per row, in nats, and
the share of rows beyond the default of health.agreement_nats. Variants: other rows in the batch, more threads, another
attention kernel, bfloat16 (also with other rows, against bfloat16 alone), and the same teacher after a few more steps
of supervised training.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from opd.fleet.membership.agreement import CheckRows, distance
from opd.fleet.settings import HealthSettings
from opd.wire.types import PayloadSpec, ScoreItem
from opd.wire.v1 import teacher_pb2 as pb
from teacher_server.engines.base import EngineItem
from teacher_server.engines.transformers import TransformersEngine

Vectors = list[NDArray[np.float32]]


def sampled_rows(model: str, count: int) -> list[ScoreItem]:
    """Rows of 8 random prompt tokens and up to 64 that the model samples after them."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    lm: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    start = torch.randint(0, lm.config.vocab_size, (count, 8), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ids = lm.generate(start, do_sample=True, max_new_tokens=64, min_new_tokens=64, pad_token_id=0)
    return [ScoreItem(row.numpy().astype(np.uint32), 8) for row in ids]


def check_rows(vocab: int, count: int) -> list[ScoreItem]:
    info = pb.TeacherInfo(name="t", vocab_size=vocab, limits=pb.Limits(max_sequence_tokens=4096))
    rows = CheckRows(HealthSettings().agreement_tokens, seed=0)
    return [rows.draw(info) for _ in range(count)]


def score(model: str, items: Sequence[ScoreItem], *, together: int = 1, threads: int = 1, **options: Any) -> Vectors:
    """[T] log-probs of every row, `together` rows to a batch."""
    torch.set_num_threads(threads)
    engine = TransformersEngine(model, device="cpu", **options)
    try:
        found: Vectors = []
        for start in range(0, len(items), together):
            batch = [EngineItem(item, PayloadSpec.sampled()) for item in items[start : start + together]]
            for scores in engine.score(batch):
                assert scores is not None and scores.sampled is not None
                found.append(np.asarray(scores.sampled, np.float32))
        return found
    finally:
        engine.close()


def train_on(model: str, folder: Path, steps: int, rate: float) -> str:
    """A copy of the model after `steps` AdamW steps on random token sequences of its own sampling."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    torch.set_num_threads(1)
    lm: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    start = torch.randint(0, lm.config.vocab_size, (8, 4), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        data = lm.generate(start, do_sample=True, max_new_tokens=24, min_new_tokens=24, pad_token_id=0)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=rate)
    for _ in range(steps):
        lm(input_ids=data, labels=data).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    out = folder / f"after-{steps}-{rate:g}"
    lm.save_pretrained(out)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)
    return str(out)


def row(name: str, one: Vectors, other: Vectors) -> dict[str, Any]:
    gaps = np.array([distance(a, b) for a, b in zip(one, other, strict=True)])
    beyond = float((gaps > HealthSettings().agreement_nats).mean())
    figures = [float(f"{value:.3g}") for value in (np.median(gaps), np.percentile(gaps, 95), gaps.max())]
    return {"variant": name} | dict(zip(("median", "p95", "max"), figures, strict=True)) | {"beyond": round(beyond, 3)}


def measure(model: str, count: int, scratch: Path, *, live: bool) -> list[dict[str, Any]]:
    """One row of figures per variant."""
    from transformers import AutoConfig

    if live:
        items = sampled_rows(model, count)
    else:
        items = check_rows(int(AutoConfig.from_pretrained(model).get_text_config().vocab_size), count)
    alone = score(model, items, dtype="f32", deterministic=True)
    half = score(model, items, dtype="bf16", deterministic=True)
    rows = [
        row("float32, the same again", alone, score(model, items, dtype="f32", deterministic=True)),
        row("float32, 16 rows in a batch", alone, score(model, items, together=16, dtype="f32")),
        row("float32, 2 threads", alone, score(model, items, threads=2, dtype="f32", deterministic=True)),
        row("float32, eager attention", alone, score(model, items, dtype="f32", attention="eager")),
        row("bfloat16, 16 rows in a batch against alone", half, score(model, items, together=16, dtype="bf16")),
        row("bfloat16, eager attention against alone", half, score(model, items, dtype="bf16", attention="eager")),
        row("bfloat16 against float32", alone, half),
    ]
    for steps, rate in ((1, 1e-5), (10, 1e-5), (100, 1e-5), (10, 1e-4), (100, 1e-4), (100, 1e-3)):
        other = train_on(model, scratch, steps, rate)
        later = score(other, items, dtype="f32", deterministic=True)
        rows.append(row(f"{steps} more training steps at {rate:g}", alone, later))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="folder of a causal LM; by default the teacher of a tiny world")
    parser.add_argument("--rows", type=int, default=64)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model
        if not model:
            from opd_lab.tiny.build import build_world

            build_world(Path(folder) / "world", "test", seed=0)
            model = str(Path(folder) / "world" / "teacher")
        for live in (False, True):
            for found in measure(model, arguments.rows, Path(folder), live=live):
                print(json.dumps({"rows": "live" if live else "check"} | found), flush=True)


if __name__ == "__main__":
    main()
