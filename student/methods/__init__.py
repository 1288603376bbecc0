"""Methods, one file per paper: terms of the objective and controllers of the loop, registered by name."""

from student.controllers import CONTROLLERS
from student.learning.terms import OBJECTIVES

__all__ = ["CONTROLLERS", "OBJECTIVES"]

for name, path, summary in [
    (
        "opd",
        "distil.opd:OnPolicyDistillation",
        "on-policy distillation: a divergence to the teacher on the student's own samples",
    ),
    (
        "gopd",
        "distil.gopd:GeneralisedOpd",
        "distillation whose teacher reward, relative to a reference, is scaled by lambda",
    ),
    ("exopd", "distil.gopd:ExOpd", "G-OPD with lambda 1.25, which extrapolates beyond the teacher"),
    ("sft", "distil.sft:SupervisedFineTuning", "cross-entropy on given answers"),
    ("reference_kl", "distil.reference_kl:ReferenceKl", "a KL penalty for moving away from a reference model"),
    ("vopd", "distil.vopd:Vopd", "sampled distillation with the KL as a control variate"),
    ("poweropd", "distil.poweropd:PowerOpd", "sampled distillation with a Box-Cox reward"),
    ("reopold", "distil.reopold:Reopold", "sampled distillation with a floor under the reward, in two phases"),
    ("iw_opd", "distil.iw_opd:IwOpd", "sampled distillation with more weight on early tokens"),
    (
        "compressed",
        "distil.compressed:Compressed",
        "sampled distillation with the log-ratio clipped or compressed logarithmically",
    ),
    ("gated_exopd", "distil.gated_exopd:GatedExOpd", "ExOPD only at tokens where student and teacher agree"),
    (
        "tide",
        "distil.tide:Tide",
        "a bounded penalty where the student is overconfident, and the teacher's top k where it lacks their mass "
        "(TIDE)",
    ),
    (
        "tail_null",
        "distil.tail_null:TailNull",
        "a null arm: a negative advantage for unlikely tokens, without a teacher",
    ),
    (
        "sage_opd",
        "distil.sage_opd:SageOpd",
        "distillation with turns weighted by a judge and by the teacher's certainty (SAGE-OPD)",
    ),
    ("tropd", "distil.tropd:Tropd", "sampled distillation inside a trust region, with the forward KL outside (TrOPD)"),
    (
        "tt_opd",
        "distil.tt_opd:TtOpd",
        "first turns taught by an average of the student that is told the outcome (TT-OPD)",
    ),
    ("tip", "distil.tip:TokenSelection", "distillation on the tokens with the highest entropy or divergence (TIP)"),
]:
    OBJECTIVES.add(name, f"student.methods.{path}", summary)

for name, path, summary in [
    (
        "expert_rows",
        "distil.expert_rows:ExpertRows",
        "mixes given answers with sampled ones: GKD's mixture, cold start",
    ),
    (
        "adwin",
        "windows.adwin:Adwin",
        "finds the shortest rollout window whose gradient points the same way as the full one (ADWIN)",
    ),
    ("fixed_window", "windows.windows:FixedWindow", "trains on a fixed prefix of each response (TOPD)"),
    ("first_n", "windows.windows:FirstN", "trains on the first N tokens of each response (ESR)"),
    ("staircase", "windows.windows:Staircase", "a rollout window that grows stepwise (POPD)"),
    ("random_tokens", "windows.random_tokens:RandomTokens", "a null arm: trains on a random part of each response"),
    ("linear_window", "windows.windows:LinearWindow", "a rollout window that grows linearly"),
    (
        "prune_opd",
        "windows.prune_opd:PruneOpd",
        "ends responses where the student has drifted away from the teacher (Prune-OPD)",
    ),
    (
        "effective_length",
        "windows.effective_length:EffectiveLength",
        "ends responses where they begin to repeat themselves",
    ),
    ("effopd", "jumps.effopd:EffOpd", "jumps along the path of the weights, as long as a gate accepts (EffOPD)"),
    ("tcod", "curricula.tcod:Tcod", "a curriculum over the turns of an episode (TCOD)"),
    ("turnopd", "curricula.turnopd:TurnOpd", "caps the turns of episodes by statistics of full episodes (TurnOPD)"),
    (
        "prefix_replay",
        "curricula.prefix_replay:PrefixReplay",
        "samples one turn at a random point of a recorded path (ReOPD)",
    ),
    ("sopd", "curricula.sopd:Sopd", "teaches the teacher's whole turn at the start of each turn of the student (SOPD)"),
    ("sage", "curricula.sage:Sage", "lets a judge decide which turns to learn from (SAGE-OPD)"),
    (
        "episode_filter",
        "curricula.episode_filter:EpisodeFilter",
        "excludes episodes from training by how they end (Mini-o3, SimpleTIR)",
    ),
    (
        "rltf",
        "distil.rltf:Rltf",
        "learns second attempts without the feedback that led to them, or the feedback itself (RLTF)",
    ),
    ("trustee", "curricula.trustee:Trustee", "makes simulated tasks harder as the student succeeds (TRUSTEE)"),
    ("modes", "curricula.modes:Modes", "gives more rows to the modes that lag behind their teachers (ORBIT)"),
    ("mask_tokens", "distil.mask_tokens:MaskTokens", "leaves special tokens out of every loss"),
    (
        "token_budget",
        "distil.token_budget:TokenBudget",
        "ends the run after a number of response tokens, for example that of another run",
    ),
]:
    CONTROLLERS.add(name, f"student.methods.{path}", summary)
