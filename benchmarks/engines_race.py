"""A teacher's tokens per second: opd's transformers engine against vLLM's own `prompt_logprobs`, on one device.

    python benchmarks/engines_race.py --json race.json    # on a GPU: 8B parameters in bfloat16, rows of 2,048 tokens
    python benchmarks/engines_race.py --quick             # a small model and few rows
    python benchmarks/engines_race.py --reduced           # a tiny model, to see that it runs

Both load the same random weights of Qwen3's architecture, each in a process of its own, and give the k most likely ids
at every response token of the same rows. The first round is not counted; of the others, the fastest counts. The
log-probs that the two give the rows' own tokens are compared too, because an engine that computes something else would
win nothing. MFU counts two operations per weight of the layers for each token and per weight of the head for each
response token, and no attention, over the device's peak (student/sizing/hardware.py; measured on a CPU). Without vLLM,
opd runs alone. If one of them fails, the figures of the other are kept and the exit code is 1.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opd.wire.types import PayloadSpec, ScoreItem
from student.sizing.hardware import hardware
from support.models import SMALL, save_model
from teacher_server.engines.base import EngineItem

LARGE = {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "vocab_size": 151_936}
LARGE |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
TINY = SMALL | {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 1024}
Round = Callable[[], list[list[float]]]
"""Scores all rows; log-probs of each row's response tokens."""


def make_items(count: int, prompt: int, response: int, vocabulary: int) -> list[ScoreItem]:
    draw = np.random.default_rng(0)
    return [ScoreItem(draw.integers(0, vocabulary, prompt + response).astype(np.uint32), prompt) for _ in range(count)]


def opd_round(folder: str, items: list[ScoreItem], k: int, dtype: str) -> Round:
    from teacher_server.engines.transformers import TransformersEngine

    engine, batch = TransformersEngine(folder, dtype={"bfloat16": "bf16", "float32": "f32"}[dtype]), 16_384
    entries = [EngineItem(item, PayloadSpec.topk(k)) for item in items]
    rows = max(1, batch // len(items[0].token_ids))

    def run() -> list[list[float]]:
        found: list[list[float]] = []
        for at in range(0, len(entries), rows):
            for scores in engine.score(entries[at : at + rows]):
                assert scores.sampled is not None
                found.append(scores.sampled.tolist())
        return found

    return run


def vllm_round(folder: str, items: list[ScoreItem], k: int, dtype: str) -> Round:
    # In this process, whose end then leaves no engine behind.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    cpu: dict[str, Any] = {}
    if not torch.cuda.is_available():
        os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        cpu = {"enforce_eager": True}
    from vllm import LLM, SamplingParams

    length = len(items[0].token_ids)
    options = {"skip_tokenizer_init": True, "max_logprobs": k, "max_model_len": length + 1, "dtype": dtype}
    llm = LLM(folder, enable_prefix_caching=False, **options, **cpu)
    asked = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, flat_logprobs=True, prompt_logprobs=k)
    prompts = [{"prompt_token_ids": item.token_ids.tolist()} for item in items]

    def run() -> list[list[float]]:
        found = []
        for output, item in zip(llm.generate(prompts, asked, use_tqdm=False), items, strict=True):
            # At each position the prompt's own token comes first, then the k most likely; the first one has none.
            table = np.asarray(output.prompt_logprobs.logprobs, np.float64).reshape(-1, k + 1)
            found.append(table[-item.response_length :, 0].tolist())
        return found

    return run


CONTESTANTS = {"opd": opd_round, "vllm": vllm_round}


def one(name: str, folder: str, k: int, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the fastest round, and the log-probs of the rows' tokens; runs in a process of its own."""
    items = make_items(options.rows, options.prompt, options.response, options.shape["vocab_size"])
    run = CONTESTANTS[name](folder, items, k, options.dtype)
    given, best = run(), float("inf")
    for _ in range(options.rounds):
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return {"seconds": best, "given": given}


def race(folder: str, k: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A record of each contestant at `k`: its figures, why it was skipped, or its error."""
    records: list[dict[str, Any]] = []
    found: dict[str, dict[str, Any]] = {}
    for name in CONTESTANTS:
        records.append({"k": k, "who": name})
        if name != "opd" and find_spec(name) is None:
            records[-1]["skipped"] = f"{name} is not installed"
            continue
        command = [sys.executable, __file__, "--one", name, "--folder", folder, "--k", str(k), *options.passed]
        said = subprocess.run(command, check=False, capture_output=True, text=True)
        if said.returncode:
            records[-1]["error"] = (said.stderr.strip().splitlines() or [f"exit code {said.returncode}"])[-1]
            print(f"{name} failed:\n{said.stderr[-3000:]}", file=sys.stderr)
        else:
            found[name] = json.loads(said.stdout.splitlines()[-1])
    tokens, answers = options.rows * (options.prompt + options.response), options.rows * options.response
    work = 2 * (options.weights["layers"] * tokens + options.weights["head"] * answers)
    for record in records:
        of = found.get(record["who"])
        if of is not None:
            record |= {
                "seconds": of["seconds"],
                "response_tokens_per_second": answers / of["seconds"],
                "of_vllm": found["vllm"]["seconds"] / of["seconds"] if "vllm" in found else None,
                "mfu": work / of["seconds"] / options.peak,
                "nats_from_opd": _furthest(of["given"], found["opd"]["given"]) if "opd" in found else None,
            }
    return records


def _furthest(given: list[list[float]], other: list[list[float]]) -> float:
    """The largest difference, nats."""
    return float(np.abs(np.array(given) - np.array(other)).max())


def _told(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    """What the figures are of."""
    shape = {"rows": options.rows, "prompt": options.prompt, "response": options.response, "dtype": options.dtype}
    return shape | {"device": device.name, "peak_flops": device.flops} | options.shape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--k", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--quick", action="store_true", help="use a small model and few rows")
    parser.add_argument("--reduced", action="store_true", help="use a tiny model and few tokens")
    parser.add_argument("--json", type=Path, default=None, help="file to write the figures to as well")
    parser.add_argument("--one", choices=list(CONTESTANTS), default=None, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.passed = [flag for flag in ("--quick", "--reduced") if getattr(options, flag[2:])]
    large = torch.cuda.is_available() and not options.passed
    options.shape, options.dtype = (LARGE, "bfloat16") if large else (SMALL, "float32")
    options.rows, options.prompt, options.response = (64, 256, 1792) if large else (8, 32, 224)
    if options.reduced:
        options.shape, options.rows, options.prompt, options.response = TINY, 4, 8, 24
    options.rounds = 1 if options.passed else 3
    if options.one:
        print(json.dumps(one(options.one, options.folder, options.k[0], options)), flush=True)
        # Not by way of vLLM's teardown, in which its process often aborts: the figures would count as an error.
        os._exit(0)
    device = hardware("here")
    options.peak = device.flops
    with tempfile.TemporaryDirectory() as folder:
        options.weights = save_model(Path(folder), options.shape, getattr(torch, options.dtype))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        figures: list[dict[str, Any]] = []
        for k in options.k:
            figures += race(folder, k, options)
            if options.json:  # after each, in case the next one is stopped
                options.json.write_text(json.dumps({"shape": _told(device, options), "figures": figures}, indent=1))
    print(f"{device.name}, {options.dtype}, {options.rows} rows of {options.prompt} + {options.response} tokens\n")
    print("| k | who | response tokens/s | of vLLM | MFU | nats from opd |\n|---|---|---|---|---|---|")
    for of in figures:
        if "seconds" not in of:
            print(f"| {of['k']} | {of['who']} | {of.get('skipped') or of['error']} | | | |")
            continue
        rate, ratio = (
            f"{of['response_tokens_per_second']:,.0f}",
            "" if of["of_vllm"] is None else f"{of['of_vllm']:.2f}",
        )
        apart = "" if of["nats_from_opd"] is None else f"{of['nats_from_opd']:.1e}"
        print(f"| {of['k']} | {of['who']} | {rate} | {ratio} | {of['mfu']:.3f} | {apart} |")
    sys.exit(int(any("error" in of for of in figures)))


if __name__ == "__main__":
    main()
