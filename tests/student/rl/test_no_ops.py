"""What would do nothing in silence is refused at --dry-run with its reason; test_notes.py has what is only said.

Each case names the system and where its hazard stands: a paper's formula that cancels, a setting without effect, or a
part that nothing feeds. What the loop itself rules out has its test elsewhere: a mean with the sample itself in it
(tests/opd_zoo/advantages/test_golden.py), statistics per rank (advantages/test_conformance.py), groups that all agree,
groups of one, a median of 0 and no right row (tests/opd_zoo/advantages/test_golden.py, test_conformance.py), a penalty
that is a number without a gradient (SAFE and EPO: tests/opd_zoo/losses/test_critic_losses.py, losses/test_terms.py),
rows that are out of the loss and still in the statistics (advantages/test_chain.py).
"""

from pathlib import Path
from typing import Any

import pytest
from small_recipes import (
    ALL,
    BY_DOMAIN,
    CHAT,
    MIXED,
    PLAIN,
    TABLE,
    credit,
    dry_run,
    method,
    noisy,
    of,
    reward,
    strategy,
)

from opd.errors import ConfigError
from student.plugin.controllers import Controller

BUDGET = "opd_zoo.distil.token_budget:TokenBudget"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "BNPO: a penalty that leaves the range": (
        of(credit("bnpo"), **reward("overlong", buffer=4, penalty=0.5)),
        "from 0 to 1, but with 'overlong' they range from -0.5 to 1; set its lowest and highest",
    ),
    "BNPO: a scale that leaves the range": (
        of(credit({"name": "bnpo", "lowest": -10}), **reward("tulu3")),
        "from -10 to 1, but with 'tulu3' they range from -10 to 10",
    ),
    "BNPO: a cosine that leaves the range": (of(credit("bnpo"), **reward("cosine_length")), "from -0.5 to 1.1"),
    "BNPO: matched calls": (of(credit("bnpo"), **reward("toolrl")), "from -3 to 4"),
    # Affine corrections and constants under a mean.
    "noise, backward: constant rates under mean and deviation": (
        noisy(credit("group_mean"), false_negative=0.2),
        "affine in the verdict.*leaves nothing",
    ),
    "noise, backward: constant rates under a mean": (
        noisy(credit("leave_one_out"), false_negative=0.2),
        "a factor that is the same",
    ),
    "noise, backward: rates by domain under mean and deviation": (noisy(credit("group_mean"), **BY_DOMAIN), "affine"),
    "noise, backward: constant rates, and a modifier that centres": (
        noisy(credit("reinforce", "outliers"), false_negative=0.2),
        "affine in the verdict",
    ),
    "noise, backward: no rates": (noisy(credit("reinforce")), "no error rates"),
    "noise, forward: a modifier that centres": (of(credit("noisy_forward", "outliers")), "minus a constant"),
    "noise, forward: learns from appeals that are not made": (
        of(credit({"name": "noisy_forward", "learns": True})),
        "needs reward appeals",
    ),
    "TTRV: an entropy under the group's mean": (of(credit("group_mean"), **reward("ttrv")), "cancels it"),
    "TTRV: groups of one": (
        of(credit("reinforce"), **reward("ttrv"), rollout={"samples_per_prompt": 1}),
        "set rollout.samples_per_prompt to 2",
    ),
    "judges: a weight under the deviation": (
        of(credit("group_mean"), **reward("judge", **CHAT, weight=2.0)),
        "weight 2 of reward 'judge'.*change nothing",
    ),
    "judges: a weight of nothing": (of(PLAIN, **reward("judge", **CHAT, weight=0.0)), "rewards nothing"),
    "ACE-RL: constraints that are not kept": (
        of(PLAIN, **reward("checklist", **CHAT), prompts=TABLE),
        "'constraints', which is not kept with the prompts",
    ),
    "Tulu 3: a scale under the deviation": (
        of(credit("group_mean"), **reward("tulu3", penalty=0)),
        "scale 10 .*change nothing",
    ),
    # Degenerate statistics.
    "MC-GRPO: a median over binary rewards": (of(credit({"name": "mc_grpo", "clamp": None})), "about 1000"),
    "NGRPO: dropped by skip_degenerate": (
        of({**credit("ngrpo"), "skip_degenerate": True}),
        "skip_degenerate, which drops",
    ),
    "GRPO: groups of one": (of({"name": "grpo"}, rollout={"samples_per_prompt": 1}), "compares the answers"),
    # Entries that would write the same metrics and notes.
    "a budget twice": (
        of(PLAIN, methods=[{"name": "token_budget", "tokens": 1000}, {"name": "token_budget", "tokens": 500}]),
        "'token_budget' is named twice",
    ),
    "a budget twice, by its path": (
        of(PLAIN, methods=[{"name": name, "tokens": 9} for name in ("token_budget", BUDGET)]),
        "is named twice",
    ),
    # Strengths without effect.
    "ACE: alpha 0": (of(credit("group_mean", {"name": "ace", "alpha": 0})), "changes nothing"),
    "SNGS: lambda0 1": (of(credit("group_mean", {"name": "sngs", "lambda0": 1})), "changes nothing"),
    "SNGS: errors of PSR, which has none": (of(credit({"name": "signed", "negative": 0}, "sngs")), "negative credit"),
    "PSR and NSR: both weights 0": (of(credit({"name": "signed", "positive": 0, "negative": 0})), "gives no credit"),
    "weighted GRPO: a weight of at most 1": (
        of(credit("group_mean", {"name": "weighted_grpo", "most": 1})),
        "greater than 1",
    ),
    "EntroPIC: both gains 0": (of({"name": "entropic", "k_p": 0, "k_i": 0}), "does not control the entropy"),
    "EPO: a penalty of 0": (of({"name": "epo", "penalty": 0}), "greater than 0"),
    "importance cap and band at once": (
        of({"name": "grpo", "ratio_to": "old", "importance_cap": 2, "importance_band": 2}),
        "the same correction in two ways",
    ),
    "GLM-5: a band beside the same ratio": (of({"name": "glm_mix", "ratio_to": "behaviour"}), "importance_band: null"),
    "GLM-5: a cap beside its band": (of({"name": "glm_mix", "importance_cap": 2}), "the same correction in two ways"),
    "a cap of a divergence that reads no sampled token": (
        of({"name": "opd", "payload": "topk", "divergence": "forward_kl", "importance_cap": 2}),
        "does not use it; remove importance_cap",
    ),
    "MiniRL: a mask of every token": (of({"name": "minirl", "beyond": "drop", "cap": 1}), "every token"),
    "importance cap beside the same ratio": (
        of({"name": "grpo", "importance_cap": 2}),
        "already makes that correction",
    ),
    "REC: a regulariser without strength": (of({"name": "rec", "regulariser": "k2"}), "set both, or neither"),
    "REC: a regulariser of the ratio without one": (
        of({"name": "rec", "regulariser": "k2", "strength": 0.1, "ratio": "none"}),
        "regulariser k2, which uses the ratio",
    ),
    "REC: a weight of the ratio without one": (of({"name": "rec", "weigh": "sequence", "ratio": "none"}), "weigh seq"),
    # Settings that a loss passes over.
    "CISPO: a clip, which is not its cap": (of({"name": "cispo", "clip_high": 0.2}), "does not use.*floor|by cap"),
    "DISPO, TOPR: a clip": (of({"name": "topr", "clip_low": 0.2}), "does not use"),
    "MinPRO, REC, DHPO, MiniRL: a dual clip": (of({"name": "rec", "dual_clip": 3}), "does not use"),
    "A-LoL: a weight by the policy that sampled, for a ratio to a reference": (
        of({"name": "a_lol", "ratio_to": "old", "importance_cap": 2}, **method("critic")),
        "importance_cap, which its loss does not use",
    ),
    "DHPO: no ratio, which has its gradient": (of({"name": "dhpo", "ratio": "none"}), "would learn nothing"),
    "A2TGPO: no ratio, which has its gradient": (of({"name": "a2tgpo", "ratio": "none"}), "would learn nothing"),
    "RL-PLUS, ROVER, MiMo: a clip": (of({"name": "rover", "clip_high": 0.2}), "does not use"),
    "MiniRL: its weight a second time": (of({"name": "minirl", "importance_cap": 2}), "would do so again"),
    "a group by a key that is misspelt": (
        of(credit({"name": "group_mean", "group": ["uuid"]})),
        "groups by 'uuid', which no row has; did you mean 'uid'",
    ),
    # Parts that nothing feeds, or that feed nothing.
    "CHORD, OTR: no given rows": (of([PLAIN, {"name": "chord"}], **method("mrs")), "nothing gives any"),
    "a method of another package that does not say that it gives rows": (
        of({"name": "sft"}, **method(f"{__name__}:Silent")),
        "in its traits .gives_rows",
    ),
    "GRPO and others: a ratio of given rows": (
        of({"name": "grpo", "rows": "all"}, **method("expert_rows", share=0.5)),
        "while its importance ratio needs these",
    ),
    "ACE, DRPO, LPO, PACS, GC-OPD: log-probs of given rows": (
        of({**credit("drpo"), "rows": "all"}, **method("expert_rows", share=0.5)),
        "while advantage .drpo. needs these",
    ),
    "LTE, Guide, ICPO: no term for hinted rows": (of(PLAIN, **strategy("lte")), "hinted rows"),
    "ICPO: no example": (of(MIXED, **strategy("icpo")), "no worked example"),
    "ICPO: groups of one": (
        of(
            {**MIXED, "advantage": {"name": "reinforce"}},
            rollout={"samples_per_prompt": 1, "strategy": {"name": "icpo", "examples": ["a"]}},
        ),
        "one answer of each group",
    ),
    "Guide: hints that are not kept": (of(MIXED, **strategy("guide"), prompts=TABLE), "keep_columns"),
    "replay: no term for replayed rows": (of(PLAIN, **strategy("replay")), "rows: all"),
    "replay: groups of one": (
        of(ALL, rollout={"samples_per_prompt": 1, "strategy": {"name": "replay"}}),
        "compares the answers",
    ),
    "replay: a share of no group": (of(ALL, **strategy("replay", share=0.1)), "replays none"),
    "replay: a loss without a correction": (of({**PLAIN, "rows": "all"}, **strategy("replay")), "older weights"),
    "RoRecomp: all answers at once": (of(ALL, **strategy("rorecomp", alpha=1.0)), "at once"),
    "RoRecomp: waits for more than it keeps": (of(ALL, **strategy("rorecomp", wait=9, capacity=8)), "would never be"),
    "adaptive oversampling: a cap of 1": (of(PLAIN, **strategy("adaptive_oversampling", cap=1)), "never draws more"),
    "dynamic sampling: groups of one": (
        of(credit("reinforce"), rollout={"samples_per_prompt": 1, "strategy": {"name": "dynamic_sampling"}}),
        "compares the answers",
    ),
    "Reinforce-Ada: keeps all it can draw": (of(PLAIN, **strategy("reinforce_ada", rounds=1)), "nothing to choose"),
    "MoPPS, PCL and other samplers: one candidate": (
        of(PLAIN, **method("mopps", candidates=1)),
        "no prompts to choose from",
    ),
    "SEC, GDRO: a column that is not kept": (
        of(PLAIN, **method("sec", by="level"), prompts=TABLE),
        "'level'.*keep_col",
    ),
    "Composition-RL: depths that are not kept": (of(PLAIN, **method("depth_curriculum"), prompts=TABLE), "'depth'"),
    "GDRO: one prompt in a step": (
        of(PLAIN, **method("prompt_gdro"), rollout={"prompts_per_step": 1}),
        "there is only one",
    ),
    "Rollout-GDRO: bounds without room": (of(PLAIN, **method("rollout_gdro", least=4)), "always makes 4"),
    "Prompt-GDRO: all classes alike": (of(PLAIN, **method("prompt_gdro", gamma=1)), "less than 1"),
    "prompt augmentation: equal templates": (
        of(PLAIN, **method("prompt_augmentation", templates=[{"text": "{prompt}"}] * 2)),
        "all equal; set",
    ),
    "prompt augmentation: a reward of formats without one": (
        of(PLAIN, **method("prompt_augmentation", format_weight=0.5)),
        "no template has a format to reward",
    ),
    "critic: values that no advantage reads": (
        of(PLAIN, **method("critic")),
        "reads the values",
    ),
    "critic: a warm-up as long as the run": (of({"name": "ppo"}, **method("critic", warm_up=20)), "warm_up of 20"),
    "ArCHer: a critic that no advantage reads": (
        of(PLAIN, **method("archer_critic")),
        "reads archer values, which method archer_critic gives",
    ),
    "ArCHer: no critic": (of(credit("archer")), "add method archer_critic"),
    "ArCHer: a warm-up as long as the run": (of(credit("archer"), **method("archer_critic", warm_up=20)), "of 20"),
    "ArCHer: a history that is cut": (
        of(credit("archer"), **method("archer_critic"), rollout={"episodes": {"history": 2}}),
        "reads whole episodes",
    ),
    "HiPER: a critic that no advantage reads": (of(PLAIN, **method("hiper_critic")), "use advantage hiper"),
    "HiPER: no critic": (of(credit("hiper")), "add method hiper_critic"),
    "SAFE: a soft minimum over one head": (
        of({"name": "ppo"}, **method("critic", softness=0.3)),
        "one head",
    ),
    "R2-OPD: a gate that is the same everywhere": (of(credit({"name": "r2_opd", "beta": 0})), "distillation alone"),
    "GAE, A-LoL, Direct Advantage PO: no critic": (of({"name": "ppo"}), "add critic to methods"),
    "RTO, Text2Grad, KL penalty: tokens that no advantage sees": (
        of(PLAIN, **reward("kl_penalty")),
        "by token",
    ),
    "IGPO: turns that no advantage reads": (of(PLAIN, **reward("igpo")), "reads rewards by turn"),
    "InfoPO, MAPO: turns that no advantage reads": (of(PLAIN, **reward("turn_judge", **CHAT)), "use advantage mapo"),
    "InfoPO: gains that nothing measures": (of(credit("infopo")), "add reward infopo or igpo"),
    "SPAE: potentials that no advantage reads": (of(PLAIN, **reward("spae")), "use advantage spae"),
    "SPAE: potentials that nothing measures": (of(credit("spae")), "add reward spae"),
    "PuzzleCraft: answers that nothing compares": (
        of(credit("group_mean", "puzzlecraft")),
        "add reward answer_classes",
    ),
    "PuzzleCraft: classes that no advantage reads": (of(PLAIN, **reward("answer_classes")), "use modifier puzzlecraft"),
    "GRPO-S: one prompt in a step": (
        of(credit("group_mean", "grpo_s"), rollout={"prompts_per_step": 1}),
        "there is only one",
    ),
    "GRPO-S: a hardness that is not kept": (
        of(credit("group_mean", {"name": "grpo_s", "column": "hardness"}), prompts=TABLE),
        "'hardness', which is not kept",
    ),
    "SPO: groups of one": (
        of(credit("reinforce"), **reward("spo", **CHAT), rollout={"samples_per_prompt": 1}),
        "compares the answers of a group",
    ),
    "RGR-GRPO: criteria that are not kept": (
        of(PLAIN, **reward("rubric", **CHAT), prompts=TABLE),
        "'rubric', which is not kept",
    ),
    "RGR-GRPO: failed criteria that nothing notes": (of(MIXED, **strategy("rubric_guide")), "add reward rubric"),
    "CURE: groups of one": (
        of(credit("reinforce"), rollout={"samples_per_prompt": 1, "strategy": {"name": "cure"}}),
        "continues answers of a group",
    ),
    "SEELE: more rounds than answers": (of(PLAIN, **strategy("seele", rounds=5)), "into 5 rounds"),
    "SEELE: solutions that are not kept": (of(PLAIN, **strategy("seele"), prompts=TABLE), "'solution', which is not"),
    "SvS: groups of one": (
        of(credit("reinforce"), rollout={"samples_per_prompt": 1, "strategy": {"name": "svs"}}),
        "problems that are sometimes solved",
    ),
    "SwS, ScaleRL: one candidate": (of(PLAIN, **method("retire", candidates=1)), "no prompts to choose from"),
    "rewards that no term learns from": (of({"name": "sft", "rows": "all"}, **reward("hapo")), "no term learns"),
    "A2TGPO, MatchTIR: groups of one": (of({"name": "a2tgpo"}, rollout={"samples_per_prompt": 1}), "learn nothing"),
    "a cap of log-probs that given rows lack": (
        of({"name": "grpo", "rows": "all", "ratio_to": "old", "importance_cap": 2}, **method("expert_rows", share=0.5)),
        "no log-probs under a policy",
    ),
    "overlong: a penalty behind the longest answer": (of(PLAIN, **reward("overlong", buffer=2, limit=99)), "at most"),
    "DLER: a limit behind the longest answer": (of(PLAIN, **reward("dler", limit=64)), "never acts"),
    "RLPR: a filter on groups of one": (
        of(credit("reinforce"), **reward("rlpr"), rollout={"samples_per_prompt": 1}),
        "spread of their rewards",
    ),
}


class Silent(Controller):
    """Of another package; it does not say that it gives rows."""


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_do_nothing_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    changes, said = REFUSED[case]
    with pytest.raises(ConfigError, match=said):
        dry_run(changes, tmp_path)
