"""What FSDP2 has gathered and when, on a group of one rank; two ranks are in tests/student/test_sharded.py."""

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from student.model.model import Student
from student.model.sharding import recover, shard, whole

SIZES = {"vocab_size": 38, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
IDS = torch.arange(6).reshape(1, 6)
PLACES = torch.zeros(2, dtype=torch.long), torch.tensor([3, 5])


@pytest.fixture
def student() -> Iterator[Student]:
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    made = Student(Qwen3ForCausalLM(config))
    close = shard(made, torch.device("cpu"), half=False)
    yield made
    close()


def hidden(student: Student) -> torch.Tensor:
    found: torch.Tensor = student(IDS, torch.ones_like(IDS), *PLACES)
    return found


def sharded(student: Student) -> bool:
    return all(isinstance(parameter, DTensor) for parameter in student.parameters())


def test_whole_gathers_the_weights_of_now_after_a_forward_that_left_older_ones(student: Student) -> None:
    shards = dict(student.named_parameters())
    with torch.no_grad():
        before = hidden(student)  # leaves embeddings and head gathered
        for parameter in shards.values():
            parameter.mul_(1.5)
        with whole(student):
            inside = hidden(student)
            assert not sharded(student)
        assert sharded(student)
        assert torch.equal(hidden(student), inside) and not torch.allclose(inside, before)


@pytest.mark.parametrize("inside", [True, False])
def test_a_forward_that_an_error_cut_off_leaves_shards_and_the_next_one_learns(student: Student, inside: bool) -> None:
    def broken(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    wanted = hidden(student)
    wanted.sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in student.named_parameters()}
    student.zero_grad()
    hook = student.lm.model.layers[1].mlp.register_forward_hook(broken)
    if inside:
        with pytest.raises(torch.OutOfMemoryError), torch.no_grad(), whole(student):
            hidden(student)
    else:
        with pytest.raises(torch.OutOfMemoryError):
            hidden(student)
        recover(student)
    hook.remove()
    assert sharded(student)
    hidden(student).sum().backward()
    assert sharded(student)
    assert all(torch.equal(parameter.grad, gradients[name]) for name, parameter in student.named_parameters())
