import os
import subprocess
import sys
from contextlib import contextmanager
from itertools import cycle

import pytest
import torch
from slow_cases import slow
from torch.testing import assert_close

from opd.heads import OutputHead
from opd.maths.linear import tiles
from opd.maths.linear.divergence import linear_divergence
from opd.maths.pointwise import divergence_spec

pytest.importorskip("triton", reason="triton is not installed: the CUDA kernels cannot be interpreted or compiled")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Compiled on a GPU, interpreted elsewhere (see conftest.py).
runs = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or TRITON_INTERPRET=1"
)
# The interpreter computes both branches of a selection with numpy, which warns of -inf - -inf and log 0 in the one
# not taken.
pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning", "ignore:divide by zero encountered:RuntimeWarning"
)
KINDS = [
    ("forward_kl", None, False),
    ("reverse_kl", None, False),
    ("jsd", 0.3, False),
    ("jsd", 1e-6, True),
    ("jsd", 1 - 1e-6, True),
    ("skew_forward_kl", 0.2, False),
    ("skew_reverse_kl", 0.2, False),
    ("total_variation", None, False),
]
CASES = ["plain", "saturated", "excluded"]


def tile(case):
    """Logits [3, 4500], more than two blocks: equal, saturated and plain rows, or all with excluded entries."""
    generator = torch.Generator().manual_seed(0)
    student = 3 * torch.randn(3, 4500, generator=generator)
    teacher = student + torch.randn(3, 4500, generator=generator)
    teacher[0] = student[0]
    if case == "saturated":
        student[1] *= 20
    if case == "excluded":
        student[:, 2048:4200], teacher[:, 2048:4200] = -torch.inf, -torch.inf
    return student.to(DEVICE), teacher.to(DEVICE)


@runs
@pytest.mark.parametrize(
    ("kind", "weight", "normalised", "case"),
    [
        *((*kind, case) for kind, case in zip(KINDS, cycle(CASES))),
        *slow(*((*kind, case) for i, kind in enumerate(KINDS) for case in CASES if case != CASES[i % len(CASES)])),
    ],
)
def test_kernels_agree_with_their_torch_twin(kind, weight, normalised, case):
    from opd.maths.linear import kernels

    spec = divergence_spec(kind, weight=weight, normalised=normalised)
    student, teacher = tile(case)
    factor = torch.linspace(0.5, 1.5, 3, device=DEVICE) * spec.scale
    ours, twin = student.clone(), student.clone()
    got = kernels.fold_(ours, teacher.clone(), spec, 0.7, factor=factor)
    want = tiles.fold_tile_(twin, teacher.clone(), spec, 0.7, factor=factor)
    unit = torch.tensor([1, 1, spec.scale, 1, 1], device=DEVICE).unsqueeze(1)
    assert_close(got * unit, want * unit, rtol=1e-5, atol=1e-5)
    assert_close(ours, twin, rtol=1e-4, atol=2e-5)


@runs
def test_the_whole_divergence_is_the_same_with_either_backend():
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE)

    hidden, head, teacher = random(7, 12), random(3000, 12), (random(7, 6), random(3000, 6))
    results = []
    for backend in ("triton", "torch"):
        leaves = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        result = linear_divergence(
            leaves[0],
            OutputHead(leaves[1], soft_cap=6.0),
            *teacher,
            kind="jsd",
            weight=0.5,
            temperature=1.5,
            scratch_bytes=3000 * 8 * 3,
            backend=backend,
        )
        result.mean.backward()
        results.append((result.per_token, result.student_entropy, leaves[0].grad, leaves[1].grad))
    for one, other in zip(*results, strict=True):
        assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch):
    from opd.maths.linear import kernels

    within = []

    @contextmanager
    def on(tensor):
        within.append(tensor)
        yield
        within.append(None)

    class Launches:
        def __getitem__(self, grid):
            return lambda *arguments, **constants: launched.append(within[-1])

    launched = []
    monkeypatch.setattr(torch.cuda, "device_of", on)
    monkeypatch.setattr(kernels, "_statistics_kernel", Launches())
    monkeypatch.setattr(kernels, "_gradient_kernel", Launches())
    student, teacher = tile("plain")
    kernels.fold_(
        student, teacher, divergence_spec("reverse_kl", weight=None, normalised=False), 1.0, factor=torch.ones(3)
    )
    assert len(launched) == 2 and all(tensor is student for tensor in launched)


@pytest.mark.slow
def test_the_kernels_compile_for_hopper_without_a_gpu_and_keep_their_numbers_in_registers(tmp_path):
    script = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from opd.maths.linear import kernels

POINTERS = ("student", "teacher", "out", "figures", "factor")
for code in (kernels._REVERSE.value, kernels._JSD.value, kernels._SKEW_REVERSE.value):
    for kernel, extra in ((kernels._statistics_kernel, {}), (kernels._gradient_kernel, {"HAS_SOFT_CAP": True})):
        constants = {"KIND": code, "VOCABULARY": 151_936, "BLOCK": kernels._BLOCK, **extra}
        kinds = {
            name: "constexpr" if name in constants else "*fp32" if name in POINTERS
            else "i32" if name.endswith("stride") else "fp32"
            for name in kernel.arg_names
        }
        # As at run time: pointers and strides that are multiples of 16 are known to be.
        aligned = [i for i, name in enumerate(kernel.arg_names) if kinds[name] == "i32" or name in POINTERS]
        source = ASTSource(
            fn=kernel, signature=kinds, constexprs=constants, attrs={(i,): [["tt.divisibility", 16]] for i in aligned}
        )
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
        assert built.asm["cubin"]
        assert ".local" not in built.asm["ptx"], "registers are spilled"
        assert "ld.global.v4" in built.asm["ptx"], "logits are read one by one"
print("compiled")
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "compiled", done.stderr[-2000:]
