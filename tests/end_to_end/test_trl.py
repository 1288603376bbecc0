"""TRL trains from a teacher of ours: its own client, and a whole run whose losses are those with a local teacher.

`make bridges` runs this. TRL's client refuses to be made without vLLM, of which scoring uses nothing, so the test says
that vLLM is there.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests

trl = pytest.importorskip("trl", reason="needs TRL: make bridges")

LOSS_TOLERANCE = 1e-4
"""Relative: the two trainers sum float32 numbers in another order, and steps add up."""


@pytest.fixture
def client_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    from trl.generation import vllm_client

    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda *_, **__: True)
    return vllm_client.VLLMClient


@pytest.fixture(scope="module")
def door(world: Path, serve: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a teacher's door, with a token that it wants in it."""
    folder = tmp_path_factory.mktemp("door")
    (folder / "tokens.yaml").write_text("- {name: trl, token: a-secret-of-the-trainer}\n")
    server = serve(
        *("--model", f"teacher={world}/teacher", "--http-port", "0", "--tokens", str(folder / "tokens.yaml")),
    )
    return f"http://trl:a-secret-of-the-trainer@127.0.0.1:{server.http_port}"


def test_its_client_gets_the_numbers_of_the_model(client_class: Any, door: str, world: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    client = client_class(base_url=door, connection_timeout=60)
    sequences, temperature, k = [[5, 9, 11, 7, 8], [6, 7, 5]], 0.9, 4
    found = client.get_sequence_logprobs(sequences, [2, 1], top_logprobs=k, temperature=temperature)
    model = AutoModelForCausalLM.from_pretrained(world / "teacher", dtype=torch.float32)
    for index, (ids, prompt) in enumerate(zip(sequences, [2, 1], strict=True)):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, prompt - 1 : -1].float() / temperature
        log_probs = torch.log_softmax(logits, -1)
        values, top = log_probs.topk(k)
        own = log_probs.gather(-1, torch.tensor(ids[prompt:])[:, None])
        assert np.allclose(found["logprobs"][index], values, atol=1e-4)
        assert found["logprob_token_ids"][index] == top.tolist()
        assert np.allclose(found["actual_logprobs"][index], own, atol=1e-4)


def test_without_the_token_it_is_refused(client_class: Any, door: str) -> None:
    with pytest.raises(Exception, match="401"):
        client_class(base_url=door.replace("a-secret-of-the-trainer", "another"), connection_timeout=60)


def run(
    trainer_class: Any, config_class: Any, world: Path, folder: Path, config: dict[str, Any], **made: Any
) -> list[float]:
    """The losses of a short run."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    args = config_class(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=3,
        learning_rate=1e-3,
        max_completion_length=8,
        temperature=0.9,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        seed=0,
        **config,
    )
    prompts = Dataset.from_dict({"prompt": [f"{n}+{n + 3}=" for n in range(10, 42)]})
    trainer = trainer_class(
        model=str(world / "student"),
        args=args,
        train_dataset=prompts,
        processing_class=AutoTokenizer.from_pretrained(world / "student"),
        **made,
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def local(world: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses with the teacher in the trainer's own process."""
    from trl import DistillationConfig, DistillationTrainer

    folder = tmp_path_factory.mktemp("local")
    return run(DistillationTrainer, DistillationConfig, world, folder, {}, teacher_model=str(world / "teacher"))


@pytest.mark.usefixtures("client_class")
def test_a_whole_run_over_http_has_the_losses_of_a_local_teacher(
    door: str, local: list[float], world: Path, tmp_path: Path
) -> None:
    from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer

    (model,) = requests.get(f"{door}/v1/models", timeout=60).json()["data"]
    everything = {"teacher_model_server_url": door, "loss_top_k": model["opd"]["vocab_size"], "loss_add_tail": False}
    served = run(ServerDistillationTrainer, ServerDistillationConfig, world, tmp_path, everything)
    assert len(served) == 3 and all(np.isfinite(served)) and served[0] > 0
    assert np.allclose(served, local, rtol=LOSS_TOLERANCE)


@pytest.mark.parametrize(("states", "tolerance"), [("f32", LOSS_TOLERANCE), ("bf16", 1e-2)])
def test_a_whole_run_with_a_fleet_as_the_teacher_model_has_them_too(
    lone_teacher: Any, local: list[float], world: Path, tmp_path: Path, states: str, tolerance: float
) -> None:
    from trl import DistillationConfig, DistillationTrainer

    from opd.bridges.transformers import FleetModel
    from opd.fleet import TeacherFleet

    with TeacherFleet.connect(lone_teacher.address) as fleet:
        teacher = FleetModel(fleet, "teacher", states=states)
        served = run(DistillationTrainer, DistillationConfig, world, tmp_path, {}, teacher_model=teacher)
        rows = fleet.status().counters.rows_answered
    assert rows == 3 * 4
    assert np.allclose(served, local, rtol=tolerance)
