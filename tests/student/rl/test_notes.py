"""What may do nothing is said at --dry-run with its reason, item by item, and what acts is not remarked on."""

import re
from pathlib import Path
from typing import Any

import pytest
from small_recipes import (
    ALL,
    BOTH_AT_2,
    BY_DOMAIN,
    CHAT,
    MIXED,
    PLAIN,
    SERVED,
    SERVERS,
    TABLE,
    credit,
    dry_run,
    method,
    noisy,
    of,
    reward,
    strategy,
)

from student.plugin.controllers import Controller
from student.plugin.traits import Traits

SAID: dict[str, tuple[dict[str, Any], str]] = {
    "GSPO and others: a clip with one update per batch": (of({"name": "gspo"}), "clip_low and clip_high .* never act"),
    "TOPR: a taper without a ratio": (
        of({"name": "topr", "ratio": "none"}),
        "the weight by the ratio .*, because ratio none",
    ),
    "OPD: the student as it starts for its teacher": (of({"name": "opd", "role": "initial"}), "no other term changes"),
    "OPD: the same, both at another temperature": (
        of({"name": "opd", "role": "initial", "payload": "hidden", **BOTH_AT_2}),
        "no other term changes",
    ),
    "OPD: the student at another temperature": (
        of({"name": "opd", "payload": "hidden", "student_temperature": 2.0, "teacher_temperature": 1.0}, **SERVED),
        "student at temperature 2 with the teacher at temperature 1",
    ),
    "OPD: later tokens at the rollouts' temperature": (
        of({"name": "opd", "payload": "hidden", "discount": 1.0, **BOTH_AT_2}, **SERVED),
        "student at temperature 1 with the teacher at temperature 2",
    ),
    "SAGE-OPD: several updates": (
        of({"name": "sage_opd"}, **SERVED, train={"minibatches": 2, "steps": 20}),
        "of the 2 updates per batch",
    ),
    "PR: wrong turns that are fast": (
        of({**PLAIN, "advantage": {"name": "trloo", "group": ["uid"]}}, **reward("profiling", speed_of="all")),
        "rewards wrong turns for their speed",
    ),
    "a budget and a schedule": (
        of(PLAIN, **method("token_budget", tokens=9), train={"schedule": "cosine", "steps": 20}),
        "may end the run before",
    ),
    "GRPO: a clip on rows of the student alone, beside hinted ones": (
        of([{"name": "grpo"}, {**MIXED, "clip_low": None, "clip_high": None}], **strategy("lte")),
        "clip_low and clip_high of term 'grpo' can never act",
    ),
    "mixed losses without hinted rows": (of(MIXED), "no hinted or given row"),
    "RL-PLUS without expert rows": (of({"name": "rl_plus"}), "no hinted or given row"),
    "NGRPO: dropped by dynamic sampling": (
        of(credit("ngrpo"), **strategy("dynamic_sampling")),
        "all equal, although adv",
    ),
    "NGRPO: dropped by oversampling": (
        of(credit("ngrpo"), **strategy("adaptive_oversampling")),
        "all equal, although adv",
    ),
    "MC-GRPO: an even number of answers": (of(credit("mc_grpo")), "odd number"),
    "BNPO: one prompt in a step": (
        of(credit("bnpo"), rollout={"prompts_per_step": 1}),
        "'bnpo' equals the reward minus",
    ),
    "MSSR: prompts that never come again": (of(credit("tracker")), "'tracker' acts by the history"),
    "HAPO: prompts that never come again": (of(PLAIN, **reward("hapo")), "'hapo' acts by the history"),
    "MoPPS and others: prompts that never come again": (
        of(PLAIN, **method("mopps")),
        "method mopps acts by the history",
    ),
    "DRIVE: a phase behind the end": (of(PLAIN, **method("drive", by="domain")), "step 100, which is never reached"),
    "AceReason: a stage behind the end": (
        of(PLAIN, **method("stages", stages=[{"step": 0}, {"step": 50, "max_new_tokens": 4}])),
        "step 50, which is never reached",
    ),
    "critic: heads that stay from a step behind the end": (
        of({"name": "ppo"}, **method("critic", fits_until=100)),
        "which is never reached",
    ),
    "RoRecomp: nothing is compensated": (of(ALL, **strategy("rorecomp", compensate=0)), "never learns"),
    "MRS: sampler and trainer are the same": (of(PLAIN, **method("mrs")), "mrs never acts"),
    "appeals that nothing learns from": (of(PLAIN, **reward("appeals", **CHAT)), "changes no reward"),
    "LPO, PACS, DRPO: a ratio on slopes of whole responses": (
        of({"name": "grpo", "advantage": {"name": "lpo"}}),
        "'lpo' is the derivative of a loss",
    ),
    "DAPO: the penalty of cut answers": (of({"name": "dapo"}, **reward("overlong", buffer=2)), "leaves them out"),
    "DAPO: cut answers that Tulu 3 penalises": (of({"name": "dapo"}, **reward("tulu3")), "leaves them out"),
    "DAPO: cut answers of a cosine": (of({"name": "dapo"}, **reward("cosine_length")), "leaves them out"),
    "DAPO: cut answers are all that DLER changes": (
        of({"name": "dapo"}, **reward("dler")),
        "'dler' rewards cut answers with 0",
    ),
    "RL-Struct: validity without a schema": (of(PLAIN, **reward("rl_struct"), prompts=TABLE), "has no schema"),
    "RLPR: a filter behind the end": (
        of(PLAIN, **reward("rlpr"), train={"steps": 10}),
        "step 10, which is never reached",
    ),
}

FINE: dict[str, dict[str, Any]] = {
    "BNPO: a penalty within the range that it is told": of(
        credit({"name": "bnpo", "lowest": -0.5}), **reward("overlong", buffer=4, penalty=0.5)
    ),
    "noise, backward: without a mean": noisy(credit("reinforce"), false_negative=0.2),
    "noise, backward: rates by domain and a mean that keeps the scale": noisy(credit("leave_one_out"), **BY_DOMAIN),
    "TTRV: an entropy without a group's mean": of(credit("reinforce"), **reward("ttrv")),
    "TTRV: an entropy at the threshold of R2-OPD": of(
        credit("r2_opd"), **reward("ttrv"), teachers={"reference": "initial", "default": "ema"}
    ),
    "a clip with several updates": of({"name": "grpo"}, train={"minibatches": 2, "steps": 20}),
    "RL-PLUS with given rows": of({"name": "rl_plus"}, **method("expert_rows", share=0.5)),
    "LPO with plain slopes": of({**credit("lpo"), "aggregation": "constant"}),
    "CHORD with given rows": of([PLAIN, {"name": "chord"}], **method("expert_rows", share=0.5)),
    "mixed losses with hinted rows": of({**MIXED, "clip_low": None, "clip_high": None}, **strategy("lte")),
    "OPD: both at another temperature": of({"name": "opd", "payload": "hidden", **BOTH_AT_2}, **SERVED),
    "OPD: the teacher at the student's temperature": of(
        {"name": "opd", "payload": "hidden", "student_temperature": 2.0}, **SERVED
    ),
    "PR: right turns that are fast": of(
        {**PLAIN, "advantage": {"name": "trloo", "group": ["uid"]}}, **reward("profiling")
    ),
    "a clip of the ratio to an engine with numerics of its own": of({"name": "grpo"}, **SERVERS),
    "a clip of the ratio to older weights": of({**ALL, "cap": 2.0}, **strategy("replay")),
    "MRS with an engine of its own": of(PLAIN, **method("mrs"), **SERVERS),
    "DAPO: the penalty of cut answers for another term": of(
        [{"name": "dapo", "clip_low": None, "clip_high": None}, PLAIN], **reward("overlong", buffer=2)
    ),
    "OPD: the first weights beside a reward": of([{"name": "opd", "role": "initial"}, PLAIN]),
    "a method of another package that says that it gives rows": of({"name": "sft"}, **method(f"{__name__}:Giving")),
    "SFT with bridges": of(
        {"name": "sft"}, **strategy("future_bridge", teacher={"endpoint": "http://h:1", "model": "t"}), **SERVED
    ),
    "mixed losses with second attempts": of(
        {**MIXED, "clip_low": None, "clip_high": None, "rows": "expert"}, **method("rltf")
    ),
    "MRS with critiques": of(
        [{**MIXED, "denominator": "one", "clip_low": None, "clip_high": None}],
        **method("mrs"),
        **strategy("critique"),
    ),
    "MoPPS by kind": of(PLAIN, **method("mopps", by="domain")),
    "Rollout-GDRO with room": of(PLAIN, **method("rollout_gdro", by="domain")),
    "a judge's cost under the deviation": of(PLAIN, **reward("judge", **CHAT, weight=-1.0)),
    "a judge's weight without a deviation": of(credit("leave_one_out"), **reward("judge", **CHAT, weight=2.0)),
}


def notes_of(shown: str) -> list[str]:
    """What a dry run notes, but for what is known of formulas."""
    notes = [line for line in shown.splitlines() if line.startswith("note: ")]
    return [note for note in notes if not note.startswith("note: the formula of")]


class Giving(Controller):
    """Of another package; it says so."""

    traits = Traits(gives_rows=("all", "expert"))


@pytest.mark.parametrize("case", SAID)
def test_what_may_do_nothing_is_said(case: str, tmp_path: Path) -> None:
    changes, said = SAID[case]
    notes = notes_of(dry_run(changes, tmp_path))
    assert any(re.search(said, note) for note in notes), notes


@pytest.mark.parametrize("case", FINE)
def test_what_acts_is_neither_refused_nor_remarked_on(case: str, tmp_path: Path) -> None:
    assert notes_of(dry_run(FINE[case], tmp_path)) == []
