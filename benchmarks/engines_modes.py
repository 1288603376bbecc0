"""What the modes and payloads of the transformers engine cost, as ratios of interleaved runs on one random model.

    python benchmarks/engines_modes.py            # about two minutes on two cores
    python benchmarks/engines_modes.py --quick    # a smaller model and fewer rounds

The model has Qwen3's architecture and random weights; the batch is n samples of each of several prompts. The baseline
"plain" is the usual loop: the rows padded to one batch, logits of every position, log_softmax over all of them, top-k.
"short rows" are like the demo's: a model of width 128 with 2 layers, 96 prompts of about ten tokens and equally short
answers.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from opd.wire.types import PayloadSpec, ScoreItem
from support.models import SMALL, save_model
from teacher_server.engines.base import EngineItem
from teacher_server.engines.transformers import TransformersEngine

Tables = dict[str, list[dict[str, object]]]


def of_width(width: int) -> dict[str, int]:
    """The small shape at another width."""
    return SMALL | {"hidden_size": width, "intermediate_size": 3 * width, "head_dim": width // 4}


def make_items(prompts: int, samples: int, prompt_length: int, k: int) -> list[ScoreItem]:
    draw = np.random.default_rng(0)
    items = []
    for _ in range(prompts):
        prompt = draw.integers(0, 8192, prompt_length)
        for _ in range(samples):
            response = int(np.clip(draw.lognormal(np.log(60), 0.5), 8, 200))
            ids = np.concatenate([prompt, draw.integers(0, 8192, response)]).astype(np.uint32)
            gather = np.stack([draw.choice(8192, k, replace=False) for _ in range(response)]).astype(np.uint32)
            items.append(ScoreItem(ids, prompt_length, gather))
    return items


def short_items(count: int) -> list[ScoreItem]:
    draw = np.random.default_rng(0)
    lengths = [(int(draw.integers(8, 14)), int(draw.integers(4, 13))) for _ in range(count)]
    return [ScoreItem(draw.integers(0, 260, p + t).astype(np.uint32), p) for p, t in lengths]


def row_by_row(folder: str) -> TransformersEngine:
    """Deterministic mode as it works where a row's numbers depend on its batch: every row by itself."""
    engine = TransformersEngine(folder, deterministic=True)
    engine._independent = False
    return engine


def plain(model: torch.nn.Module, items: list[ScoreItem], k: int) -> None:
    longest = max(len(item.token_ids) for item in items)
    ids, mask = np.zeros((2, len(items), longest), np.int64)
    for row, item in enumerate(items):
        ids[row, : len(item.token_ids)], mask[row, : len(item.token_ids)] = item.token_ids, 1
    with torch.inference_mode():
        logits = model(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)).logits
        torch.log_softmax(logits.float(), -1).topk(k, -1)


def ratios(ways: dict[str, Callable[[], object]], base: str, rounds: int) -> list[dict[str, object]]:
    """Median over rounds of each way's processor time over the base's; other work on the machine matters little."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for run in ways.values():
        run()
    for _ in range(rounds):
        for name, run in ways.items():
            start = time.process_time()
            run()
            taken[name].append(time.process_time() - start)
    out: list[dict[str, object]] = []
    for name, times in taken.items():
        relative = [t / b for t, b in zip(times, taken[base], strict=True)]
        out.append({"way": name, "time_over_base": round(statistics.median(relative), 2), "base": base})
    return out


def scoring(engine: TransformersEngine, spec: PayloadSpec, items: list[ScoreItem]) -> Callable[[], object]:
    """A way that asks an engine for one payload of all items."""
    return lambda: engine.score([EngineItem(item, spec) for item in items])


def measure(
    folder: str, short_folder: str, items: list[ScoreItem], short: list[ScoreItem], k: int, rounds: int
) -> Tables:
    """The three tables: modes and payloads of the model in `folder`, and modes on the short rows of the other."""
    topk, shared = PayloadSpec.topk(k), TransformersEngine(folder)
    settled = TransformersEngine(folder, deterministic=True)
    if not settled._independent:
        print("the numbers of rows depend on the batch on this machine: deterministic mode runs row by row")
    modes = {
        "prompts shared (default)": scoring(shared, topk, items),
        "prompts not shared": scoring(TransformersEngine(folder, share_prompts=False), topk, items),
        "deterministic": scoring(settled, topk, items),
        "deterministic, row by row": scoring(row_by_row(folder), topk, items),
        "plain": lambda: plain(shared._model, items, k),
    }
    on_short = {
        "default": scoring(TransformersEngine(short_folder), topk, short),
        "deterministic": scoring(TransformersEngine(short_folder, deterministic=True), topk, short),
        "deterministic, row by row": scoring(row_by_row(short_folder), topk, short),
    }
    payloads = {
        "hidden": scoring(shared, PayloadSpec.hidden(), items),
        "sampled": scoring(shared, PayloadSpec.sampled(), items),
        f"topk({k})": scoring(shared, topk, items),
        f"gather({k})": scoring(shared, PayloadSpec.gather(k), items),
    }
    return {
        "modes": ratios(modes, "prompts shared (default)", rounds),
        "short rows": ratios(on_short, "default", rounds),
        "payloads": ratios(payloads, "hidden", rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, help="file to write the tables to as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    k, rounds = 64, 3 if arguments.quick else 7
    items = make_items(2 if arguments.quick else 4, 4 if arguments.quick else 8, 256, k)
    short = short_items(96)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as short_folder:
        save_model(Path(folder), of_width(128) if arguments.quick else SMALL)
        save_model(Path(short_folder), of_width(128) | {"num_hidden_layers": 2, "vocab_size": 260})
        tables = measure(folder, short_folder, items, short, k, rounds)
    for title, rows in tables.items():
        what = f"{len(short)} short rows" if title == "short rows" else f"{len(items)} rows, prompts of 256 tokens"
        print(f"{title}: {what}, time relative to {rows[0]['base']}")
        for row in rows:
            print(f"  {row['way']:28} {row['time_over_base']:6.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(tables, indent=1))


if __name__ == "__main__":
    main()
