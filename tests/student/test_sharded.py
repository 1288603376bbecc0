"""The student under FSDP2 (`fully_shard`), two ranks in processes of their own.

Gradients and jumps are those of one process, ranks make different numbers of forwards, state goes from one to two.
"""

import json
import re
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from saved_state import save_state
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from student.run.checkpoint import find_damage, list_checkpoints
from student.state.state_io import load_state

SIZES = {
    "vocab_size": 38,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
# Rows that two ranks share unevenly, a row that only one of them has, and halves.
MOMENTS = {
    "a.weight": torch.arange(35.0).reshape(7, 5),
    "b.bias": torch.arange(3).to(torch.bfloat16),
    "c": torch.ones(1, 4),
}

SETUP = (
    f"SIZES = {SIZES}"
    + """
import json, sys, torch
from contextlib import nullcontext
from pathlib import Path
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from transformers import Qwen3Config, Qwen3ForCausalLM
from opd.maths import linear_divergence
from student.data.prefixes import Prefixes
from student.data.report import EvalReport
from student.methods.jumps.effopd import EffOpd, EffOpdSettings
from student.model.model import Student
from student.plugin.controllers import begin

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
rendezvous = folder / "rendezvous"
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))

def build(tied):
    torch.manual_seed(0)
    return Student(Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied)))

def shard(student, reshard):
    for layer in student.lm.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(student, mesh=mesh, reshard_after_forward=reshard)
"""
)

GRADIENTS = """
torch.manual_seed(1)
ids = torch.randint(0, 38, (2, 3, 7))
ids[:, :, :2] = ids[:, :1, :2]  # all rows of a rank begin alike
teacher_hidden, teacher_head = torch.randn(2, 6, 5), torch.randn(38, 5)
row, source = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([3, 4, 3, 5, 2, 6])

def loss_of(student, part, shared=False):
    first = Prefixes(ids[part][:1, :2], torch.tensor([2]), torch.zeros(3, dtype=torch.long)) if shared else None
    read = ids[part][:, 2:] if shared else ids[part]
    hidden = student(read, torch.ones_like(read), row, source, first)
    head = student.head()
    return linear_divergence(hidden, head.weight, teacher_hidden[part], teacher_head).mean

def worst(tied, reshard, shared):
    whole = build(tied)
    (sum(loss_of(whole, part) for part in range(2)) / 2).backward()
    sharded = shard(build(tied), reshard)
    traffic = CommDebugMode()
    with nullcontext() if shared else traffic:  # which fails where a layer runs twice before the backward pass
        loss_of(sharded, rank, shared).backward()
    # FSDP's own collectives are of another kind: these are the head's, there and back.
    counts = {str(op): count for op, count in traffic.get_comm_counts().items()}
    of_head = [counts.get(f"c10d_functional.{op}", 0) for op in ("all_gather_into_tensor", "reduce_scatter_tensor")]
    wanted = {name: p.grad for name, p in whole.named_parameters()}
    errors = {
        name: (p.grad.full_tensor() - wanted[name]).abs().max().item() for name, p in sharded.named_parameters()
    }
    least = min(g.abs().max().item() for g in wanted.values())
    once = [1, 1] if reshard and not shared else [0, 0]
    return [max(errors.values()), len(errors), least, of_head, once]

both = (True, False)
print(json.dumps([worst(tied, reshard, shared) for tied in both for reshard in both for shared in both]))
"""

JUMPS = """
def report(accuracy):
    return EvalReport(accuracy=accuracy, per_prompt=(), mean_length=1.0, truncated=0.0, reverse_kl=None, tokens=1)

class Fake:
    def __init__(self, student):
        self.lm = student.lm
        self.optimizer = torch.optim.AdamW(student.parameters(), lr=0.01)
        self.script = []

    def parameters(self):
        return self.lm.named_parameters()

    def optimizer_moments(self):
        return ((name, self.optimizer.state.get(p, {})) for name, p in self.parameters())

    def training_prompts(self, count, seed_names):
        return []

    def evaluate(self, prompts, **names):
        return report(self.script.pop(0))

    def update(self, seed):
        generator = torch.Generator().manual_seed(seed)
        for _, p in self.parameters():
            p.grad = torch.zeros_like(p)
            whole = torch.randn(p.shape, generator=generator)
            p.grad.copy_(distribute_tensor(whole, mesh, p.placements) if isinstance(p, DTensor) else whole)
        self.optimizer.step()

def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

def jumped(student, moments):
    services = Fake(student)
    method = EffOpd(EffOpdSettings.model_validate({"name": "effopd", "moments": moments}))
    begin(method, services)
    found = []
    # Two jumps accepted and the third refused; then none accepted; then all five.
    for updates, script in enumerate([[0.1, 0.2, 0.3, 0.3], [0.5, 0.4], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]]):
        services.update(updates)
        before = {name: full(p).clone() for name, p in services.parameters()}
        services.script = script
        metrics = method.after_update(2**updates - 1, services)
        assert not services.script and isinstance(metrics["effopd/accepted"], float)
        changed = sum((full(p) != before[name]).any().item() for name, p in services.parameters())
        found.append([metrics["effopd/accepted"], changed])
    state = {f"{n}/{key}": full(value) for n, values in services.optimizer_moments() for key, value in values.items()}
    return found, {name: full(p).detach() for name, p in services.parameters()} | state

from torch.distributed.tensor import DTensor, distribute_tensor
def compare(moments):
    found, wanted = jumped(build(True), moments)
    again, got = jumped(shard(build(True), True), moments)
    equal = set(got) == set(wanted) and all(torch.equal(got[name], wanted[name]) for name in wanted)
    return [found, again, equal, len(wanted)]

print(json.dumps([compare(moments) for moments in ("keep", "reset", "rescale")]))
"""

STATE = """
import os, resource, shutil
from functools import partial
import student.run.checkpoint as checkpoints
from opd.errors import RunFolderError
from student.model.ranks import Ranks
from student.model.sharding import mesh_of, shard as shard_student, whole
from student.run.beside import Beside
from student.run.model_folder import model_parts
from student.state.parts import Part
from student.state.state_io import load_state, state_parts

ranks = Ranks(group=dist.group.WORLD)

def passes(half):
    plain, student = build(True), build(True)
    shard_student(student, torch.device("cpu"), half=half)
    kept = {str(p.dtype) for p in student.parameters()}
    with torch.no_grad(), whole(student):
        # One rank makes two forwards past the wrapper, the other three.
        drawn = [student.lm(ids[i % 2]).logits for i in range(2 + rank)]
    wanted = plain.bfloat16() if half else plain
    with torch.no_grad():
        error = max((logits - wanted.lm(ids[i % 2]).logits).abs().max().item() for i, logits in enumerate(drawn))
    loss_of(student, rank).backward()
    again = {str(p.dtype) for p in student.parameters()} | {str(p.grad.dtype) for p in student.parameters()}
    return [error, sorted(kept), sorted(again)]

student = build(True)
shard_student(student, torch.device("cpu"), half=False)
mesh = mesh_of(student)
state = load_state(folder, "one", mesh)
sharded = [isinstance(state["moments"][name], DTensor) for name in sorted(state["moments"])]
for part in state_parts("two", state, main=rank == 0):
    list(part.write(folder))
dist.barrier()

class Tokenizer:
    def save_pretrained(self, place):
        (place / "tokenizer.json").write_text("{}")

def parts(group=None, copied=False):
    # Files so small that several hold the layers.
    yield from model_parts("model", student, Tokenizer(), ranks, limit=4096, copied=copied)
    yield from state_parts("trainer/learner", state, main=rank == 0, group=group, copied=copied)

def save(step, parts, ranks=ranks, root=folder / "checkpoints"):
    return checkpoints.save_checkpoint(root, step, parts, keep=2, ranks=ranks)

listing = Path.rglob
if rank:  # as on a network file system, which shows what others wrote later
    Path.rglob = lambda self, pattern: iter(())
save(1, parts())
Path.rglob = listing
print(json.dumps([passes(False), passes(True), sharded, state["updates"]]))

def full_disk(write, folder):
    # No file may be longer than a byte.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    try:
        return list(write(folder))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

def failing(culprit, number):
    for count, part in enumerate(parts()):
        yield Part(part.name, partial(full_disk, part.write)) if (rank, count) == (culprit, number) else part

def failed_save(culprit, number):
    try:
        save(2, failing(culprit, number))
        said = ""  # it had nothing to write
    except RunFolderError as error:
        said = str(error)
    found = [ranks.gather(said), sorted(os.listdir(folder / "checkpoints"))]
    ranks.gather(None)
    if rank == 0 and not said:
        shutil.rmtree(folder / "checkpoints" / "step-000002")
    return found

print(json.dumps([[failed_save(culprit, number) for number in range(5)] for culprit in range(2)]))
save(2, parts())

# Written from copies in a thread, while the weights, the moments and collectives of the loop go on.
other, beside = ranks.beside(), Beside()
held = list(parts(other.group, copied=True))
beside.start(lambda: save(3, held, other, folder / "beside"))
with torch.no_grad():
    for tensor in [*student.parameters(), *state["moments"].values()]:
        tensor.mul_(2)
while ranks.any(beside.busy):
    pass
beside.wait()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[list[Any]]]]:
    """What two ranks print, a line for each script; a state that one process wrote lies in their folder."""
    folder = tmp_path_factory.mktemp("ranks")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    save_state(folder, "one", {"updates": 7, "moments": {n: distribute_tensor(t, mesh) for n, t in MOMENTS.items()}})
    dist.destroy_process_group()
    out = forked.ranks(SETUP + GRADIENTS + JUMPS + STATE, folder)
    return folder, [[json.loads(line) for line in lines if line.startswith("[[")] for lines in out]


@pytest.mark.slow
def test_a_fully_sharded_student_gets_the_gradients_of_one_process(told: tuple[Path, list[list[list[Any]]]]) -> None:
    """Tied and untied heads; weights kept whole, or gathered again; rows whole, or after a prefix."""
    for cases, *_ in told[1]:
        assert len(cases) == 8
        for error, count, least, of_head, once in cases:
            assert error < 1e-6 and count >= 20 and least > 1e-5
            assert of_head == once


@pytest.mark.slow
def test_jumps_of_a_fully_sharded_student_are_those_of_one_process_bit_for_bit(
    told: tuple[Path, list[list[list[Any]]]],
) -> None:
    """With the optimizer's moments kept, reset and rescaled."""
    for _, cases, *_ in told[1]:
        assert len(cases) == 3
        for one, two, equal, count in cases:
            # Seven matrices in each of two layers move; a refused jump leaves every tensor as it was.
            assert one == two == [[2.0, 14], [0.0, 0], [5.0, 14]]
            assert equal and count > 60


@pytest.mark.slow
def test_within_whole_each_rank_makes_forwards_of_its_own_and_masters_stay_in_float32(
    told: tuple[Path, list[list[list[Any]]]],
) -> None:
    for _, _, (plain, half, *_), _ in told[1]:
        assert plain == [pytest.approx(0.0, abs=1e-6), ["torch.float32"], ["torch.float32"]]
        assert half == [pytest.approx(0.0, abs=1e-2), ["torch.float32"], ["torch.float32"]]


@pytest.mark.slow
def test_state_goes_from_one_process_to_two_and_back_bit_for_bit(told: tuple[Path, list[list[list[Any]]]]) -> None:
    folder, lines = told
    assert all(sharded == [True] * len(MOMENTS) and updates == 7 for _, _, (_, _, sharded, updates), _ in lines)
    assert [len(list((folder / f"{name}-shards").iterdir())) for name in ("one", "two")] == [1, 2]
    back = load_state(folder, "two")
    assert back["updates"] == 7 and back["moments"].keys() == MOMENTS.keys()
    assert all(torch.equal(back["moments"][name], tensor) for name, tensor in MOMENTS.items())


@pytest.mark.slow
def test_when_a_rank_cannot_write_every_rank_says_which_and_the_last_checkpoint_stays(
    told: tuple[Path, list[list[list[Any]]]],
) -> None:
    folder, lines = told
    assert lines[0][3] == lines[1][3]
    shards = "trainer/learner-shards"
    parts = [
        [
            "model",
            "model/model-00001-of-00004.safetensors",
            "model/model-00003-of-00004.safetensors",
            shards,
            "trainer/learner",
        ],
        ["", "model/model-00002-of-00004.safetensors", "model/model-00004-of-00004.safetensors", shards, ""],
    ]
    for culprit, saves in enumerate(lines[0][3]):
        for part, (said, left) in zip(parts[culprit], saves, strict=True):
            assert said[0] == said[1]
            if part == "":  # it had nothing to write
                assert said[0] == "" and left == ["step-000001", "step-000002"]
                continue
            assert left == ["step-000001"]
            assert re.fullmatch(
                rf"checkpoint \S+/step-000002 cannot be written by rank {culprit}: {part}: .*[Ff]ile too large.*; "
                r"free space or allow writing there, and continue with --resume\.",
                said[0],
            ), said[0]
    assert [find_damage(path) for path in list_checkpoints(folder / "checkpoints")] == [None, None]


@pytest.mark.slow
def test_a_checkpoint_written_beside_the_loop_is_that_of_the_moment_it_was_asked_for(
    told: tuple[Path, list[list[list[Any]]]],
) -> None:
    beside, usual = told[0] / "beside" / "step-000003", told[0] / "checkpoints" / "step-000002"
    assert find_damage(beside) is None
    files = [json.loads((folder / "manifest.json").read_text())["files"] for folder in (beside, usual)]
    assert files[0].keys() == files[1].keys()
    # The order of torch's notes in the head of a file of shards is not fixed.
    assert {n for n in files[0] if files[0][n] != files[1][n]} <= {n for n in files[0] if "-shards/" in n}
    mine, theirs = (load_state(folder / "trainer", "learner")["moments"] for folder in (beside, usual))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_every_file_is_in_the_manifest_also_where_a_rank_does_not_see_those_of_others(
    told: tuple[Path, list[list[list[Any]]]],
) -> None:
    for checkpoint in list_checkpoints(told[0] / "checkpoints"):
        there = {str(p.relative_to(checkpoint)) for p in checkpoint.rglob("*") if p.is_file()} - {"manifest.json"}
        assert set(json.loads((checkpoint / "manifest.json").read_text())["files"]) == there and len(there) > 8


@pytest.mark.slow
def test_the_folder_of_a_sharded_model_is_that_of_a_whole_one(
    told: tuple[Path, list[list[list[Any]]]], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    lm = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True))
    lm.save_pretrained(tmp_path)
    model = told[0] / "checkpoints" / "step-000001" / "model"
    files = sorted(path.name for path in model.glob("model-*.safetensors"))
    assert len(files) >= 3 and files[-1] == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    mine, theirs = (AutoModelForCausalLM.from_pretrained(folder) for folder in (model, tmp_path))
    assert (model / "config.json").read_text() == (tmp_path / "config.json").read_text()
    assert mine.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in mine.state_dict().items())
