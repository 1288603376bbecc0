"""Exact divergences between hidden states times heads: time and memory of opd, the materialised form, TRL and Liger.

    python benchmarks/maths_linear.py                        # sizes for this machine; peers if they are installed
    python benchmarks/maths_linear.py --tokens 8192 65536 --vocabulary 151936 --hidden 4096   # a GPU's default

Every contestant runs forward and backward in a process of its own, in rounds, and its best time counts. On CPU a round
is one pass after a small one, in processor time, so that other work on the machine matters little; on a GPU it is five
passes after one of full size, in wall-clock time. Memory is the peak above the inputs, less the gradients, which every
contestant returns. The two floors are what the matrix products and the traffic alone would take at the rates measured
in the same run. Ratios are against the materialised form. The exit code is 1 if opd itself failed.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

CONTESTANTS = ("opd", "materialised", "trl", "liger")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=None)
    parser.add_argument("--vocabulary", type=int, default=None)
    parser.add_argument("--hidden", type=int, default=None)
    parser.add_argument("--dtype", default=None, choices=["float32", "bfloat16"])
    parser.add_argument("--kinds", nargs="+", default=["reverse_kl", "jsd"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", nargs="+", default=list(CONTESTANTS), choices=CONTESTANTS)
    parser.add_argument("--json", type=Path, default=None, help="file to write the figures to as well")
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    options.tokens = options.tokens or ([8192, 65536] if on_gpu else [4096])
    options.vocabulary = options.vocabulary or (151_936 if on_gpu else 32_768)
    options.hidden = options.hidden or (4096 if on_gpu else 256)
    options.dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    torch.set_num_threads(options.threads)
    if options.one:
        print(json.dumps(measure(options.one, options.tokens[0], options.kinds[0], options)))
    else:
        sys.exit(report(options))


def report(options: argparse.Namespace) -> int:
    """Runs all contestants in rounds and prints the table; 1 where opd failed, else 0."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {options.threads} threads"
    matrix_rate, bandwidth = rates(options)
    print(f"{device}; V {options.vocabulary}, H {options.hidden} on both sides, {options.dtype}")
    print(f"measured rates: {matrix_rate / 1e9:.1f} GFLOP/s matrix product, {bandwidth / 1e9:.1f} GB/s copy\n")
    header = ("divergence", "tokens", "who", "seconds", "time ratio", "extra MiB", "memory ratio")
    print("| " + " | ".join((*header, "x flop floor", "x byte floor")) + " |")
    print("|---|---|---|---|---|---|---|---|---|")
    figures: list[dict] = []
    shape = {"device": device, "vocabulary": options.vocabulary, "hidden": options.hidden, "dtype": options.dtype}
    shape |= {"flops": matrix_rate, "bytes_per_second": bandwidth}
    for kind in options.kinds:
        for tokens in options.tokens:
            best = rounds(kind, tokens, options)
            base = {"seconds": float("nan"), "extra": float("nan")} | best.get("materialised", {})
            flop_floor, byte_floor = floors(tokens, options, matrix_rate, bandwidth)
            for who, found in best.items():
                row = {"kind": kind, "tokens": tokens, "who": who}
                figures.append(row)
                if "seconds" not in found:
                    row |= found
                    print(f"| {kind} | {tokens} | {who} | {next(iter(found.values()))} | | | | | |")
                    continue
                row |= {
                    "seconds": found["seconds"],
                    "time_ratio": found["seconds"] / base["seconds"],
                    "extra_mib": found["extra"] / 2**20,
                    "memory_ratio": found["extra"] / base["extra"],
                    "of_flop_floor": found["seconds"] / flop_floor,
                    "of_byte_floor": found["seconds"] / byte_floor,
                }
                print(
                    f"| {kind} | {tokens} | {who} | {row['seconds']:.3f} | {row['time_ratio']:.2f} "
                    f"| {row['extra_mib']:.0f} | {row['memory_ratio']:.3f} "
                    f"| {row['of_flop_floor']:.2f} | {row['of_byte_floor']:.2f} |",
                    flush=True,
                )
            if options.json:  # after each, in case the next one is stopped
                # Without the materialised form there are no ratios: JSON has no NaN.
                text = json.dumps({"shape": shape, "figures": figures}, indent=1).replace(": NaN", ": null")
                options.json.write_text(text)
    return int(any(row["who"] == "opd" and "error" in row for row in figures))


def rounds(kind: str, tokens: int, options: argparse.Namespace) -> dict[str, dict]:
    """Best time and smallest peak of each contestant over interleaved rounds."""
    best: dict[str, dict] = {}
    for _ in range(options.rounds):
        for who in options.only:
            if who in best and "seconds" not in best[who]:
                continue
            command = [interpreter(), __file__, "--one", who, "--kinds", kind, "--tokens", str(tokens)]
            for name in ("vocabulary", "hidden", "dtype", "threads"):
                command += [f"--{name}", str(getattr(options, name))]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            lines = done.stdout.strip().splitlines()
            if done.returncode or not lines:
                message = (done.stderr.strip().splitlines() or [f"killed, exit {done.returncode}"])[-1][:90]
                found = {"error": "out of memory" if done.returncode in (-9, 137) else message}
            else:
                found = json.loads(lines[-1])
            if "seconds" not in found or who not in best:
                best[who] = found
            else:
                best[who] = {name: min(best[who][name], found[name]) for name in found}
    return best


def interpreter() -> str:
    """The environment of `make oracles`, which has the peers, for all contestants; else this one."""
    peers = Path(__file__).parents[1] / ".venv-oracles/bin/python"
    return str(peers) if peers.exists() else sys.executable


def measure(who: str, tokens: int, kind: str, options: argparse.Namespace) -> dict:
    """Seconds and extra bytes of one forward and backward pass in this process."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        run = CALLS[who](kind)
    except ImportError as error:
        return {"skipped": f"{error.name} is not installed"}
    inputs = make_inputs(tokens, options, device)
    run(*make_inputs(16, options, device)).backward()
    start_memory(device)
    seconds = [one_pass(run, inputs, device)]
    returned = sum(leaf.grad.nbytes for leaf in inputs if leaf.grad is not None)
    extra = max(peak_memory(device) - returned, 1)
    if device == "cuda":  # the first pass of this size loaded kernels
        seconds = [one_pass(run, inputs, device) for _ in range(5)]
    return {"seconds": min(seconds), "extra": extra}


def one_pass(run: Callable[..., Tensor], inputs: list[Tensor], device: str) -> float:
    """Seconds of one forward and backward pass, to the end of the device's work."""
    for leaf in inputs:
        leaf.grad = None
    clock = time.perf_counter if device == "cuda" else time.process_time
    start = clock()
    run(*inputs).backward()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def make_inputs(tokens: int, options: argparse.Namespace, device: str) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, options.dtype)
    tensors = []
    for index, rows in enumerate((tokens, options.vocabulary, tokens, options.vocabulary)):
        tensor = torch.randn(rows, options.hidden, generator=generator, device=device).mul_(options.hidden**-0.25)
        tensors.append(tensor.to(dtype).requires_grad_(index < 2))
    return tensors


def start_memory(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start_memory.base = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        start_memory.base = resident("VmRSS")


def peak_memory(device: str) -> int:
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else resident("VmHWM")
    return peak - start_memory.base


def resident(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def call_opd(kind: str):
    from opd.maths import linear_divergence

    weight = 0.5 if kind == "jsd" else None
    return lambda hs, ws, ht, wt: linear_divergence(hs, ws, ht, wt, kind=kind, weight=weight, check_values=False).mean


def call_materialised(kind: str):
    def loss(hs: Tensor, ws: Tensor, ht: Tensor, wt: Tensor) -> Tensor:
        log_p = torch.log_softmax((hs @ ws.T).float(), -1)
        with torch.no_grad():
            log_q = torch.log_softmax((ht @ wt.T).float(), -1)
        if kind == "reverse_kl":
            return (log_p.exp() * (log_p - log_q)).sum(-1).mean()
        if kind == "forward_kl":
            return (log_q.exp() * (log_q - log_p)).sum(-1).mean()
        log_m = torch.logaddexp(log_p, log_q) - torch.log(torch.tensor(2.0))
        return 0.5 * (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)).sum(-1).mean()

    return loss


def call_trl(kind: str):
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    beta = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}[kind]
    return lambda hs, ws, ht, wt: ChunkedDivergenceFunction.apply(hs, ws, None, ht, wt, None, beta)[0].mean()


def call_liger(kind: str):
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    beta = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}[kind]
    module = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, compiled=torch.cuda.is_available()
    )

    def loss(hs: Tensor, ws: Tensor, ht: Tensor, wt: Tensor) -> Tensor:
        labels = torch.zeros(len(hs), dtype=torch.int64, device=hs.device)
        found = module(hs, ws, ht, wt, labels)
        return found[0] if isinstance(found, tuple) else found

    return loss


CALLS = {"opd": call_opd, "materialised": call_materialised, "trl": call_trl, "liger": call_liger}


def rates(options: argparse.Namespace) -> tuple[float, float]:
    """Operations per second of a matrix product, and bytes per second of a copy, on this machine now."""
    device, dtype = ("cuda" if torch.cuda.is_available() else "cpu"), getattr(torch, options.dtype)
    rows = 4096 if device == "cuda" else 512
    left = torch.randn(rows, options.hidden, device=device).to(dtype)
    right = torch.randn(options.hidden, 16_384, device=device).to(dtype)
    source = torch.empty(1 << (30 if device == "cuda" else 27), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    clock = time.perf_counter if device == "cuda" else time.process_time

    def best(call) -> float:
        times = []
        for _ in range(8):
            start = clock()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(clock() - start)
        return min(times)

    product = best(lambda: left @ right)
    copy = best(lambda: target.copy_(source))
    return 2 * rows * options.hidden * 16_384 / product, 2 * len(source) / copy


def floors(tokens: int, options: argparse.Namespace, matrix_rate: float, bandwidth: float) -> tuple[float, float]:
    """Seconds of the four unavoidable matrix products, and of reading inputs and writing gradients once."""
    product = 2 * tokens * options.vocabulary * options.hidden
    width = getattr(torch, options.dtype).itemsize
    traffic = (tokens + options.vocabulary) * options.hidden * width * 3
    return 4 * product / matrix_rate, traffic / bandwidth


if __name__ == "__main__":
    main()
