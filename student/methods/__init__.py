"""Methods, one file per paper: terms of the objective and controllers of the loop, registered by name."""

from student.controllers import CONTROLLERS
from student.learning.terms import OBJECTIVES

__all__ = ["CONTROLLERS", "OBJECTIVES"]

for name, path, summary in [
    ("opd", "distil.opd:OnPolicyDistillation", "a divergence to the teacher on the student's samples"),
    (
        "gopd",
        "distil.gopd:GeneralisedOpd",
        "distillation with the teacher's reward scaled by lambda, against a reference",
    ),
    ("exopd", "distil.gopd:ExOpd", "G-OPD with lambda 1.25: beyond the teacher"),
    ("sft", "distil.sft:SupervisedFineTuning", "cross-entropy on given answers"),
    ("reference_kl", "distil.reference_kl:ReferenceKl", "a penalty for leaving a reference model"),
    ("vopd", "distil.vopd:Vopd", "sampled distillation with the KL as control variate"),
    ("poweropd", "distil.poweropd:PowerOpd", "sampled distillation with a Box-Cox reward"),
    ("reopold", "distil.reopold:Reopold", "sampled distillation with a floor under the reward, in two phases"),
    ("iw_opd", "distil.iw_opd:IwOpd", "sampled distillation with more weight on early tokens"),
    ("compressed", "distil.compressed:Compressed", "sampled distillation with the log-ratio clipped or logarithmic"),
    ("gated_exopd", "distil.gated_exopd:GatedExOpd", "ExOPD only at tokens where student and teacher agree"),
    ("tide", "distil.tide:Tide", "a bounded penalty on overconfidence, the teacher's top k where the student lacks it"),
    ("tail_null", "distil.tail_null:TailNull", "a null: a negative advantage for unlikely tokens, without a teacher"),
    ("sage_opd", "distil.sage_opd:SageOpd", "distillation with turns weighted by a judge and the teacher (SAGE-OPD)"),
    ("tropd", "distil.tropd:Tropd", "sampled distillation in a trust region, forward KL outside"),
    ("tt_opd", "distil.tt_opd:TtOpd", "turns taught by an average that is told the outcome (TT-OPD)"),
    ("tip", "distil.tip:TokenSelection", "distillation on the tokens with the highest entropy or divergence"),
]:
    OBJECTIVES.add(name, f"student.methods.{path}", summary)

for name, path, summary in [
    ("expert_rows", "distil.expert_rows:ExpertRows", "given answers among the sampled ones: GKD's mix, cold start"),
    ("adwin", "windows.adwin:Adwin", "the shortest rollout window whose gradient points where the full one does"),
    ("fixed_window", "windows.windows:FixedWindow", "train on a fixed prefix of each response (TOPD)"),
    ("first_n", "windows.windows:FirstN", "train on the first N tokens (ESR)"),
    ("staircase", "windows.windows:Staircase", "a rollout window that grows in stairs (POPD)"),
    ("random_tokens", "windows.random_tokens:RandomTokens", "train on a random part of each response: a null"),
    ("linear_window", "windows.windows:LinearWindow", "a rollout window that grows linearly"),
    ("prune_opd", "windows.prune_opd:PruneOpd", "end responses where student and teacher have drifted apart"),
    ("effective_length", "windows.effective_length:EffectiveLength", "end responses where they repeat themselves"),
    ("effopd", "jumps.effopd:EffOpd", "jump along the path of the weights, as long as a gate accepts"),
    ("tcod", "curricula.tcod:Tcod", "distil the turns of episodes one after the other (TCOD)"),
    ("turnopd", "curricula.turnopd:TurnOpd", "a cap on turns, set from statistics of full episodes (TurnOPD)"),
    ("prefix_replay", "curricula.prefix_replay:PrefixReplay", "one turn at a point of a recorded path (ReOPD)"),
    ("sopd", "curricula.sopd:Sopd", "whole turns of the teacher wherever the student began one (SOPD)"),
    ("sage", "curricula.sage:Sage", "a judge says of each turn whether to learn there (SAGE-OPD)"),
    ("episode_filter", "curricula.episode_filter:EpisodeFilter", "episodes not to train on (Mini-o3, SimpleTIR)"),
    ("rltf", "distil.rltf:Rltf", "second attempts learnt without the feedback they had, or the feedback (RLTF)"),
    ("trustee", "curricula.trustee:Trustee", "simulated tasks, harder as the student succeeds (TRUSTEE)"),
    ("modes", "curricula.modes:Modes", "more rows for the modes that lag behind their teachers (ORBIT)"),
    ("mask_tokens", "distil.mask_tokens:MaskTokens", "leave special tokens out of every loss"),
    ("token_budget", "distil.token_budget:TokenBudget", "end after as many response tokens as another run had"),
]:
    CONTROLLERS.add(name, f"student.methods.{path}", summary)
