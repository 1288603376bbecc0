"""Costs count what was written, not what an environment said."""

import numpy as np
import pytest
from rows import make_row

from student.data.costs import Costs
from student.data.row import EpisodeTrace, Row


@pytest.mark.parametrize(("origin", "name"), [("policy", "sampled_tokens"), ("expert", "expert_tokens")])
def test_an_environments_text_and_replayed_actions_are_read_and_not_written(origin: str, name: str) -> None:
    def row(masked: int) -> Row:
        mask = np.arange(6) < masked
        played = EpisodeTrace(mask) if masked else None
        return make_row([1, 2, 3, 4, 5, 6], origin=origin, episode=played, loss_mask=~mask)

    costs = Costs()
    costs.sampled("train", [row(0), row(4)])
    found = costs.take()
    assert found[f"cost/train/{name}"] == 6 + 2
    positions = found["cost/train/decoded_positions" if origin == "policy" else "cost/train/expert_positions"]
    assert positions == sum(len(one.prompt_ids) + 6 for one in (row(0), row(4)))


def test_the_turns_that_a_branch_shares_are_not_written_again() -> None:
    said = np.arange(6) == 2  # by the environment, between two turns of which the first is shared
    costs = Costs()
    costs.sampled("train", [make_row(6, turns=((0, 2), (3, 6)), notes={"branched": 1.0}, episode=EpisodeTrace(said))])
    assert costs.take()["cost/train/sampled_tokens"] == 6 - 1 - 2
