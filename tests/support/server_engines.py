"""What tests of engines on rollout servers do with them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from other_weights import move
from sglang_rollouts import SglangRollouts

from opd.config import parse_settings
from student.data.row import Row
from student.rollout.engine import ROLLOUT_ENGINES, EngineSetup
from student.rollout.requests import RolloutSpec
from student.rollout.servers.engine import ServersEngine


def engine_on(
    servers: tuple[SglangRollouts, ...], path: Path, folder: Path, model: Any = None, **settings: Any
) -> ServersEngine:
    """An engine on stand-ins, by default for a student whose weights are not the servers' first ones."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    cls = ROLLOUT_ENGINES.load("sglang_server")
    entry = {"name": "sglang_server", "endpoints": [server.url for server in servers], "in_flight": 2}
    entry |= {"folder": str(folder), "patience_seconds": 0.0, **settings}
    engine: ServersEngine = cls(parse_settings(cls.settings_type, entry))
    tokenizer = AutoTokenizer.from_pretrained(path)
    if model is None:
        model = AutoModelForCausalLM.from_pretrained(path)
        move(model)
    spec = RolloutSpec(seed=7, batch_rows=4, candidates=3, valid_vocab=len(tokenizer), max_prompt_tokens=40)
    engine.open(EngineSetup(model, tokenizer, spec, str(path)))
    return engine


def sync(engine: ServersEngine, version: int = 1) -> None:
    """Have the servers hold the student's weights as they are."""
    engine.sync([(n, p) for n, p in engine.setup.model.named_parameters() if p.requires_grad], version)


def ids(rows: list[Row]) -> list[list[int]]:
    """The tokens of each row."""
    return [row.response_ids.tolist() for row in rows]


def check(engine: ServersEngine, rows: list[Row]) -> None:
    """That log-probs are those of the student as it is."""
    for row in rows:
        whole = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64))[None]
        with torch.no_grad():
            logits = engine.setup.model(whole).logits[0, :-1, : engine.setup.spec.valid_vocab]
        logp = logits.log_softmax(-1).gather(-1, whole[0, 1:, None])[-row.length :, 0]
        np.testing.assert_allclose(row.behaviour_logp, logp.numpy(), atol=1e-3)
