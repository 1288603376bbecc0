"""Routing replay: what a rollout records, what an update does with it, and what reaches the router."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from opd.errors import ConfigError
from opd.tasks.prompt import Prompt
from opd_zoo.updates.routing_replay import RoutingReplay, RoutingReplaySettings, recorded, replayed
from student.data.hooks import Reading
from student.data.row import EpisodeTrace, Row, RowKey
from student.data.states import row_from_state, row_to_state
from student.model import moe_routes
from student.model.moe_routes import Recorder, gates, routers
from student.model.recompute import recompute

PROMPT = Prompt.make("x")
IDS = ((3, 1, 4), (1, 5, 9, 2, 6)), ((2, 7), (1, 8, 2))
SIZES: dict[str, Any] = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}


def mixture(**more: Any) -> Qwen3MoeForCausalLM:
    """Experts 1 and 2 of four look alike to the router, and answer differently."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SIZES,
        num_key_value_heads=1,
        head_dim=4,
        moe_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
        **more,
    )
    lm = Qwen3MoeForCausalLM(config).double()
    lm.config._experts_implementation = "eager"  # which has float64
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
        for router in routers(lm):
            router.weight[2] = router.weight[1]
    return lm


def leaning(lm: Qwen3MoeForCausalLM, expert: int) -> Qwen3MoeForCausalLM:
    """The same model to 1e-9, whose router takes `expert` where 1 and 2 are even: another engine's rounding."""
    other = copy.deepcopy(lm)
    for router in routers(other):

        def lean(module: Any, inputs: Any, output: Any) -> Any:
            logits = output[0].clone()
            logits[:, expert] += 1e-9
            probs = torch.softmax(logits, -1)
            choice = probs.topk(2, -1).indices
            return output[0], gates(module, output[0], choice, torch.double), choice

        router.register_forward_hook(lean)
    return other


def rows() -> list[Row]:
    return [
        Row(
            key=RowKey(0, PROMPT.uid, sample),
            prompt=PROMPT,
            prompt_ids=np.array(prompt, np.uint32),
            response_ids=np.array(answer, np.uint32),
            behaviour_logp=np.zeros(len(answer), np.float32),
            policy_version=np.zeros(len(answer), np.int32),
            loss_mask=np.ones(len(answer), np.bool_),
            truncated=False,
            text="",
        )
        for sample, (prompt, answer) in enumerate(IDS)
    ]


def read(lm: Qwen3MoeForCausalLM, which: list[Row]) -> tuple[torch.Tensor, Reading]:
    width = max(row.longest for row in which)
    ids = torch.zeros(len(which), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for line, row in enumerate(which):
        whole = np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64)
        ids[line, : len(whole)], mask[line, : len(whole)] = torch.from_numpy(whole), 1
    return ids, Reading("update", tuple(which), width)


def log_probs(lm: Qwen3MoeForCausalLM, which: list[Row]) -> torch.Tensor:
    ids, _ = read(lm, which)
    found = lm(input_ids=ids, attention_mask=(ids >= 0).long(), use_cache=False).logits.log_softmax(-1)
    return torch.cat([found[i, : row.longest - 1] for i, row in enumerate(which)])


def test_what_was_sampled_through_other_experts_has_the_sampled_log_probs_again() -> None:
    sampler, trainer = leaning(mixture(), 1), leaning(mixture(), 2)
    batch = rows()
    _, reading = read(sampler, batch)
    with recorded(sampler, reading), torch.no_grad():
        sampled = log_probs(sampler, batch)
    assert batch[0].moe_routes is not None and batch[0].moe_routes.shape == (8, 2, 2)  # tokens, layers, k
    counts = np.zeros(3)
    with replayed(trainer, reading, counts), torch.no_grad():
        again = log_probs(trainer, batch)
    with torch.no_grad():
        own = log_probs(trainer, batch)
    assert (again - sampled).abs().max() < 1e-6 and (own - sampled).abs().max() > 0.01
    assert counts[0] == counts[1] == 13 and 0 < counts[2] <= 13


def test_a_gate_is_the_training_softmax_over_the_recorded_experts() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]], dtype=torch.double, requires_grad=True)
    plain, normalised = (routers(mixture(norm_topk_prob=norm))[0] for norm in (False, True))
    experts = torch.tensor([[0, 3]])  # not its own choice, which is 2 and 1
    found = gates(normalised, logits, experts, torch.double)
    assert found.tolist()[0] == pytest.approx([0.7310586, 0.2689414], abs=1e-6)  # 1 / (1 + 1/e)
    assert gates(plain, logits, experts, torch.double).tolist()[0] == pytest.approx([0.0871443, 0.0320586], abs=1e-6)
    found[0, 0].backward()
    assert logits.grad is not None  # of the two recorded alone: g (1 - g)
    assert logits.grad.tolist()[0] == pytest.approx([0.1966119, 0, 0, -0.1966119], abs=1e-6)


@pytest.mark.parametrize("norm", [False, True])
def test_the_router_learns_from_replayed_experts_also_where_activations_are_computed_again(norm: bool) -> None:
    batch = rows()
    lm = mixture(norm_topk_prob=norm)
    _, reading = read(lm, batch)
    sampler = leaning(lm, 1)
    with recorded(sampler, reading), torch.no_grad():
        log_probs(sampler, batch)
    gradients, counted = [], []
    for again in (False, True):
        lm = mixture(norm_topk_prob=norm)
        if again:
            recompute(lm)
        with torch.no_grad():
            for router in routers(lm):
                router.weight.add_(torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(1)))
        counts = np.zeros(3)
        with replayed(lm, reading, counts):
            log_probs(lm, batch)[:, 3].sum().backward()
        counted.append(counts.tolist())
        gradients.append([p.grad.clone() for p in lm.parameters() if p.grad is not None])
        assert all(router.weight.grad.abs().sum() > 0 for router in routers(lm))
    assert counted[0] == counted[1] and counted[0][2] > 0  # nothing is counted twice
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-8)


def test_a_replay_of_the_own_choice_changes_no_bit_of_a_row_without_a_record_and_no_number_of_one_with() -> None:
    lm, batch = mixture(), rows()
    _, reading = read(lm, batch)
    with torch.no_grad():
        plain = log_probs(lm, batch)
        with recorded(lm, reading):
            log_probs(lm, batch)
        batch[1].moe_routes = None
        counts = np.zeros(3)
        with replayed(lm, reading, counts):
            found = log_probs(lm, batch)
    torch.testing.assert_close(found, plain, atol=1e-6, rtol=0)
    assert torch.equal(found[7:], plain[7:]) and counts.tolist() == [13, 8, 0]


def test_rows_of_which_none_has_a_record_pass_their_own_experts() -> None:
    lm, batch = mixture(), rows()
    _, reading = read(lm, batch)
    counts = np.zeros(3)
    with torch.no_grad(), replayed(lm, reading, counts):
        found = log_probs(lm, batch)
    with torch.no_grad():
        assert torch.equal(found, log_probs(lm, batch)) and counts.tolist() == [13, 0, 0]


def test_records_outlive_a_checkpoint_and_others_than_softmax_routers_are_refused() -> None:
    row = rows()[0]
    row.moe_routes = np.arange(32, dtype=np.int16).reshape(8, 2, 2)
    again = row_from_state(row_to_state(row)).moe_routes
    assert again is not None and np.array_equal(again, row.moe_routes) and again.dtype == np.int16
    dense = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=8))
    with pytest.raises(ConfigError, match=r"no router .*LlamaForCausalLM"):
        routers(dense)
    lm = mixture()
    for router in routers(lm):
        router.register_forward_hook(lambda module, inputs, output: (output[0], output[0].sigmoid()[:, :2], output[2]))
    with Recorder(lm), pytest.raises(ConfigError, match="choice of a Qwen3MoeTopKRouter"), torch.no_grad():
        log_probs(lm, rows())


def test_a_router_is_asked_for_its_rule_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison waits for a GPU in every layer."""
    asked, known = list[Any](), moe_routes.gates
    monkeypatch.setattr(moe_routes, "gates", lambda router, *given: asked.append(router) or known(router, *given))
    lm = mixture()
    for _ in range(3):
        with Recorder(lm), torch.no_grad():
            log_probs(lm, rows())
    assert asked == routers(lm)


def test_an_episode_is_not_replayed_from_its_rollout() -> None:
    row = rows()[0]
    row.episode = EpisodeTrace(np.zeros(row.length, np.bool_))
    with pytest.raises(ConfigError, match="set source: old"):
        RoutingReplay(RoutingReplaySettings(name="routing_replay")).compose([row])
