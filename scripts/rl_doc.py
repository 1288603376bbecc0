"""Write docs/rl.md from the code: python scripts/rl_doc.py [OUT]."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
INTRO = """# Reinforcement learning

Losses, advantages, rewards, samplers and rollout strategies of reinforcement learning, each a plug-in that a recipe
chooses by name. This page is written by `python scripts/rl_doc.py`; a test fails when it is out of date.

A policy loss is a term of the objective. It asks a chain of advantages for the credit of each row or token: one
estimator, followed by any number of modifiers. Most losses differ from REINFORCE only where the student has moved away
from the policy that sampled, so set `train.minibatches` or `train.epochs`.

Examples are parts of a recipe; the rest is that of the [quick start](quickstart.md#the-recipe).

```yaml
rollout: {samples_per_prompt: 8}
objective:
  - name: cispo
    cap: 5
    aggregation: prompt_mean
    advantage: [{name: lite_ppo}, {name: sngs}]
train: {minibatches: 4}
```

- **Recipes with a critic**: `examples/recipes/qwen3-4b-ppo-math.yaml` is PPO, `llama-3.1-8b-tulu3-rlvr.yaml` is the
  last stage of Tulu 3.
- **Deeper prompts** come from `opd compose prompts.jsonl --out composed.jsonl`.
- **Comparisons in a tiny world**: `opd lab run rl_losses` compares losses off policy; `rl_advantages`, `rl_samplers`,
  `rl_strategies` and `rl_lengths` cover the other families. [claims.md](claims.md) has the results.

How to read the tables:

- `example` is a line for a list of the recipe, under the key in the heading of its section.
- `evidence` says how a formula is known: from the paper's text and released code, from its text, from its abstract or
  notes on it, or inferred; "own" means that it is ours.
- `golden test` names the test that holds its golden numbers.
- `opd plugins show NAME` prints the whole formula, its source, what the plug-in needs, and every setting with its
  default.
"""

ELSEWHERE = (
    "student/rollout/test_dynamic_sampling.py",
    "student/rollout/test_sampling.py",
    "opd/tasks/test_chat.py",
    "opd/tasks/test_grpc_judge.py",
)
"""Golden numbers that are neither under tests/student/rl nor under tests/opd_zoo."""

EXAMPLES: dict[str, str] = {
    "overlong": "{name: overlong, buffer: 4096}",
    "noisy_verifier": "{name: noisy_verifier, false_negative: 0.2}",
    "function": '{name: function, function: "my_rewards:brevity"}',
    "judge": '{name: judge, endpoint: "http://host:8000/v1", model: judge}',
    "http_judge": '{name: http_judge, endpoint: "http://host:8000"}',
    "grpc_judge": '{name: grpc_judge, endpoint: "host:7080"}',
    "checklist": '{name: checklist, endpoint: "http://host:8000/v1", model: judge}',
    "appeals": '{name: appeals, endpoint: "http://host:8000/v1", model: judge}',
    "text2grad": '{name: text2grad, endpoint: "http://host:8000/v1", model: judge}',
    "rubric": '{name: rubric, endpoint: "http://host:8000/v1", model: judge}',
    "spo": '{name: spo, endpoint: "http://host:8000/v1", model: judge}',
    "consistency": '{name: consistency, endpoint: "http://host:8000/v1", model: judge}',
    "turn_judge": '{name: turn_judge, endpoint: "http://host:8000/v1", model: judge}',
    "stages": "{name: stages, stages: [{step: 0, domains: [math]}, {step: 300, domains: [code]}]}",
    "prompt_augmentation": '{name: prompt_augmentation, templates: [{text: "{prompt}"}, {text: "Q: {prompt}"}]}',
    "safe": "{name: safe, advantage: {name: gae}}",
    "cispo": "{name: cispo, cap: 5}",
    "critic": "{name: critic, warm_up: 10}",
    "icpo": "{name: icpo, examples: ['1+1=2']}",
    "future_bridge": '{name: future_bridge, teacher: {endpoint: "http://host:8000/v1", model: teacher}}',
}
"""Example lines of plug-ins that say more than their name."""

PAPERS: dict[str, str] = {
    "glm_mix": "2602.15763",
    "kl_penalty": "1909.08593",
    "asym_re": "2506.20520",
    "lite_ppo": "2508.08221 2510.15110",
    "minpro": "2601.22718",
    "mixed_context": "2510.26519 2506.13923 2510.26109",
    "opmd": "2509.24203",
    "outliers": "2505.02835",
    "pacs": "2509.02522",
    "rec": "2509.24203",
    "reinforce_pp": "2501.03262",
    "rl_plus": "2508.00222",
    "sngs": "2602.22190",
    "stable_reinforce": "2505.02835",
    "trloo": "2602.05885",
    "weighted_grpo": "2602.03452",
    "sample_balance": "2508.18462",
    "puzzlecraft": "2512.14944",
    "grpo_s": "2503.18991",
    "precision": "2512.22955",
    "rmt": "2509.24375",
}
"""Papers of plug-ins that share a module with those of others."""

SYSTEMS = """
LPO | advantage `lpo` with `divergence`
Composition-RL | `opd compose`, method `depth_curriculum`
GPS, MoPPS | methods `gps`, `mopps`
ORBIT | stages and fusion of modes: [methods.md](methods.md)
EntroPIC | objective `entropic`
DRIVE (Pre-GRPO) | method `drive`
ICPO | strategy `icpo`, objective `mixed_context` with `denominator: one`
LTE | strategy `lte`, objective `mixed_context`
Lite PPO | advantage `lite_ppo`
PACS | advantage `pacs`
ACE | modifier `ace`
RL-PLUS | objective `rl_plus`, method `expert_rows`
ROVER | objective `rover`
SAFE | objective `safe`, method `critic` with `heads: 2`, `softness: 0.3`
Guide | strategy `guide`, objective `mixed_context` with `quantile: 0.9`
RLPR | reward `rlpr`
AceReason-Nemotron | method `stages`
RAPO | objectives `rapo_kl`, `entropy_bonus`
GUI-Libra | modifier `sngs`, objective `asft`
SELF | strategy `self_interference`
Noisy-verifier corrections | reward `noisy_verifier` (backward), advantage `noisy_forward`, reward `appeals`
CodeV-R1 | strategy `adaptive_oversampling`; `data round-trip` of the command line, with its tests, for Python
RoRecomp | strategy `rorecomp`
Dr. MAS | advantage `dr_mas`; `group: [uid, agent]` of any estimator where agents have rows of their own
Direct Advantage PO | objective `dapo_direct`, method `critic`
NGRPO | advantage `ngrpo`, `clip_low: 0.16`, `clip_high: 0.24`
Dr. Kernel: TRLOO, PR, PRS, MRS | advantage `trloo`, reward `profiling`, methods `prs` and `mrs`, objective `minirl`
ARPO | strategy `arpo`: its soft advantage, whose gradient the hard one has while no ratio is clipped
TRUSTEE | environment `simulated`, reward and method `trustee`: [environments.md](environments.md)
TOPR | objective `topr`
REC, OPMD, AsymRE | objective `rec` with `rule`, `weigh` and `regulariser`, advantages `rec_balance`, `opmd`, `asym_re`
MC-GRPO | advantage `mc_grpo`
BNPO | advantage `bnpo`
PSR, NSR, W-REINFORCE | advantage `signed`
Reinforce-Ada | strategy `reinforce_ada`, advantage `group_mean` with `scale: none`
MiniRL | objective `minirl`, with `beyond` for masks; methods `mrs` and `routing_replay`
Routing replay (R2, R3) | method `routing_replay` with `source: old` or `source: rollout`
Truncated, masked importance sampling | `importance_cap`, `importance_band` of any policy loss
R1-Reward: StableReinforce | objective `stable_reinforce`, modifier `outliers`
Positive-negative pairing, weighted GRPO | method `positive_negative`, modifier `weighted_grpo`
DHPO | objective `dhpo`, with `mix_by` for a mix by entropy
Prompt augmentation | method `prompt_augmentation`
MSSR | advantage `tracker`, modifier `entropy_shaping`
MinPRO | objective `minpro`
DISPO, CISPO | objectives `dispo`, `cispo`
OTR | objective `otr`
A-LoL | objective `a_lol`, advantage `prompt_value`, method `critic`
EPO | objective `epo`, with `phases: true` for its phases
GDRO | methods `prompt_gdro`, `rollout_gdro`
DRPO | advantage `drpo`
Balanced Aggregation | `aggregation: balanced` of any policy loss
Text2Grad | reward `text2grad`, advantage `gae`
RL-Struct | reward `rl_struct`
RL finetunes small subnetworks | method `update_sparsity`
PCL | method `pcl`
HAPO | reward `hapo`
G2RL | method `g2rl`
DLER, DA-DLER | reward `dler`, advantage `lite_ppo` with `of: centred`; `opd merge` ties, density 0.25, scale 0.7
RTO | rewards `rto`, `kl_penalty`, advantage `gae`
ACE-RL | reward `checklist`
SEC | method `sec`
TTRV | reward `ttrv`
FunRL | modifier `entropy_shaping` with `until`
CHORD | objective `chord` beside `grpo`
Tulu 3 (RLVR) | rewards `tulu3`, `kl_penalty`, objective `ppo`
GC-OPD | advantage `gc_opd`, objective `policy_gradient`
R2-OPD (reward-aligned) | advantage `r2_opd`, objective `policy_gradient`
UFO | environment `again` with `reward: ufo`
SCoRe | environment `again` with `reward: last`, `reference_kl` with `first_turns`; then `reward: score`; `trloo`
Critique-GRPO | strategy `critique`, objective `mixed_context` with `denominator: one` and no clips
RLTF-SD, RLTF-FM | method `rltf`
GiGPO | advantage `gigpo`
A2TGPO | reward `igpo`, advantage and objective `a2tgpo`
MatchTIR | reward and advantage `matchtir`
SeeUPO | method `seeupo`, objective `gspo` with `ratio_to: old`, advantage `lite_ppo`
ArCHer | advantage `archer`, method `archer_critic`, `policy_gradient` with `ratio: none`; heads without a backbone
HiPER | advantage `hiper`, method `hiper_critic`, `reference_kl`: `examples/recipes/qwen2.5-1.5b-hiper-alfworld.yaml`
ATLAS (its lineage) | `data trace`, `data decontaminate` of the command line: [prompts.md](prompts.md)
DeepMath-103K (its decontamination) | `data decontaminate`
KnowRL | `data hints` writes the column of strategy `guide`
InT | `data intervene`, method `expert_rows` with objective `sft`
SPO | reward `spo`, any policy gradient
VERIRL | modifier `sample_balance`, reward `http_judge` for its reward model
CURE | strategy `cure`, objective `dapo`; then plain `dapo` from its checkpoint
SEELE | strategy `seele`
RGR-GRPO | reward `rubric`, strategy `rubric_guide`, objective `mixed_context`
InfoPO | reward and advantage `infopo`
SPAE | reward and advantage `spae`
MAPO | reward `turn_judge`, advantage `mapo`
R1-Reward: its reward | reward `consistency`
PuzzleCraft (its weight) | modifier `puzzlecraft`, reward `answer_classes`
DR-IRL: GRPO-S | modifier `grpo_s`, rewards `judge` or `http_judge` for reward models by category
SwS | method `weak_prompts`; new prompts are rows of the same table
SvS | strategy `svs`
RLGF: PPO++ | method `roll_in`, objective `ppo`, method `critic`
ExIt | method `exit`
ScaleRL | method `retire`, objective `cispo` with `cap: 5` and `aggregation: prompt_mean`, advantage `lite_ppo`
SimpleTIR | method `episode_filter` with `void: true`
RMT | objective `rmt` beside a policy loss, method `stages` for a budget that falls
Diversity or Precision | objective `precision`, method `expert_rows`
RLPT | task `segments`
G1 | task `graphs`
NP-Engine | task `optimisation`, method `sec` with `by: level`
EVOLvE | environment and task `bandit`; `expert_rows` with `source: path` for UCB's pulls
Router-R1 | environment `router`
BR-RM | environment `preference`
Turn-PPO | objective `ppo` with `ratio: turn`, method `critic`
TT-OPD | objective `tt_opd` with a context, reward `cosine_length`: [curricula.md](curricula.md)
RLSD | objective `rlsd` with a context: `examples/recipes/qwen3-8b-rlsd.yaml`
MiMo, GLM-5 | objectives `mimo_mix`, `glm_mix`
limit of RLVR (pass@k) | `eval.samples`: pass@k of evaluations
"""

NOT_BUILT = """
SG-OPD (2606.09304) | factors 1.8 and 1.0 are known, not of what (log-ratio, or that beyond a reference); see `r2_opd`
R2-OPD (2608.19408) | spans, the progress reward and the test of disagreement were not found; `r2_opd` is another one
S-PPO, ST-PPO (2511.20718) | accounts differ on what the clipped part's norm does to the loss; Turn-PPO is `ratio: turn`
RLGF: AggreVaTeD (2306.11816) | the guide would continue answers of the student; no second model is sampled
Guided-OPD | not written: turns of the teacher by chance, less often as training goes on; see `future_bridge`, `sopd`
"""


RESULT = re.compile(
    r"(?:so\s+)?(?P<symbol>A(?:\^?_\w+|\(t\))?|loss(?:_t)?|whole(?:_i)?|part|r_[tk])\s*(?P<sign>[<+-]?=|[<-]-|->|\s{2})\s*"
)
"""The beginning of a line that defines a credit, a loss or a reward; columns stand for a sign of equality."""


def formula(module: Any, name: str) -> list[str]:
    """The lines of the module's formula about `name`, else of the one that defines the result, else of the first."""
    found = formulas(module.__doc__ or "")
    about = [[re.sub(rf"^{name}\s+", "", first), *rest] for first, *rest in found if re.match(rf"{name}\b", first)]
    results = [lines for lines in found if RESULT.match(lines[0])]
    first, *rest = (about or results or [lines for lines in found if "=" in lines[0]] or found or [[""]])[0]
    if result := RESULT.match(first):
        sign = result["sign"].strip() or "="
        first = f"{result['symbol']} {sign} {first[result.end() :]}"
    return [re.sub(r"\s{2,}", "  ", line.replace("`", "")) for line in (first, *rest) if line]


def formulas(text: str) -> list[list[str]]:
    """The formulas of a docstring, line by line; a line that is indented more than the first ones continues one."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("     ") and found:
            found[-1].append(line.strip())
        elif line.startswith("    "):
            found.append([line.strip()])
    return found


def papers(module: Any, name: str) -> str:
    """ArXiv ids that a module names for `name`, or at all, as links."""
    text = module.__doc__ or ""
    if name in PAPERS:
        return " ".join(f"[{one}](https://arxiv.org/abs/{one})" for one in PAPERS[name].split())
    parts = [part for part in re.split(r";|\n\n|\n    ", text) if _letters(name) in _letters(part)]
    ids = [re.findall(r"\b\d{4}\.\d{4,5}\b", found) for found in (" ".join(parts), text)]
    return " ".join(f"[{one}](https://arxiv.org/abs/{one})" for one in dict.fromkeys(ids[0] or ids[1]))


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def golden(name: str, cls: Any) -> str:
    """The test with the golden numbers of a plug-in: the likeliest that names it and is not a conformance test."""
    wanted = re.compile(rf"\b{cls.__name__}\(|[\"']{name}[\"']|{re.escape(cls.__module__)} import")
    package, *_, folder, _ = cls.__module__.split(".")
    zoo = package == "opd_zoo"
    places = [path for folder in ("student/rl", "opd_zoo") for path in TESTS.glob(f"{folder}/**/test_*.py")]
    places += [TESTS / path for path in ELSEWHERE]
    best = {"test_golden.py": 0, "test_formulas.py": 0}
    best[f"test_{name}.py"] = -1
    places.sort(
        key=lambda path: (
            path.parent.name != folder,
            best.get(path.name, 1),
            ("opd_zoo" in path.parts) != zoo,
            str(path),
        )
    )
    for path in places:
        # The oracles are not in `make test`: they need TRL.
        skipped = path.name in ("test_conformance.py", "test_remarks.py", "test_oracles.py", "test_importance_cap.py")
        if not skipped and wanted.search(path.read_text(encoding="utf-8")):
            return str(path.relative_to(TESTS))
    return ""


def example(name: str) -> str:
    """A line of a recipe."""
    return EXAMPLES.get(name, f"{{name: {name}}}")


def sections() -> Iterator[tuple[str, Any, str]]:
    """(title, registry, pattern of the paths) of each table."""
    from student.plugin.controllers import CONTROLLERS
    from student.plugin.strategy import STRATEGIES
    from student.plugin.terms import OBJECTIVES
    from student.rl import ADVANTAGES, REWARDS

    yield "Policy losses (`objective:`)", OBJECTIVES, r"(student\.rl|opd_zoo)\.losses"
    yield "Advantages (`advantage:`)", ADVANTAGES, ""
    yield "Rewards (`rewards:`)", REWARDS, ""
    yield (
        "Critic, filter, measurement (`methods:`)",
        CONTROLLERS,
        r"student\.rl\.\w+:|opd_zoo\.(critics|filters|updates)",
    )
    yield "Samplers and curricula (`methods:`)", CONTROLLERS, "opd_zoo.samplers"
    yield "Rollout strategies (`rollout: {strategy: ...}`)", STRATEGIES, ""


def table(registry: Any, pattern: str) -> str:
    """A row per plug-in whose path begins with `pattern`."""
    lines = [
        "| name | what it is | formula | papers | evidence | example | golden test |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for entry in registry:
        if not re.match(pattern, entry.path):
            continue
        plugin = registry.load(entry.name)
        module = sys.modules[plugin.__module__]
        shown = [line.replace("|", "\\|") for line in formula(module, entry.name)]
        cells = [
            f"[`{entry.name}`](../{module.__name__.replace('.', '/')}.py)",
            entry.summary,
            "<br>".join(f"`{line}`" for line in shown),
            papers(module, entry.name),
            getattr(plugin, "evidence", "") or "own",
            f"`{example(entry.name)}`",
            golden(entry.name, plugin),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def rows(text: str, *columns: str) -> str:
    """A table from lines with | between their cells."""
    head = [f"| {' | '.join(columns)} |", "| " + " | ".join("---" for _ in columns) + " |"]
    return "\n".join([*head, *(f"| {line} |" for line in text.strip().splitlines())])


def render() -> str:
    """The whole document."""
    parts = [f"\n## {title}\n\n{table(registry, pattern)}\n" for title, registry, pattern in sections()]
    systems = f"\n## Published systems\n\n{rows(SYSTEMS, 'system', 'how to choose it')}\n"
    missing = f"\n## Not built, and why\n\n{rows(NOT_BUILT, 'what', 'why')}\n"
    return INTRO + "".join(parts) + systems + missing


if __name__ == "__main__":
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "rl.md"
    out.write_text(render(), encoding="utf-8")
