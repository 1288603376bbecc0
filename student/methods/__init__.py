"""Methods: a paper a file. Terms of the objective and controllers of the loop, by name."""

from student.controllers import CONTROLLERS
from student.learning.terms import OBJECTIVES

__all__ = ["CONTROLLERS", "OBJECTIVES"]

for name, path, summary in [
    ("opd", "opd:OnPolicyDistillation", "a divergence to the teacher on the student's samples"),
    ("gopd", "gopd:GeneralisedOpd", "distillation with the teacher's reward scaled by lambda, against a reference"),
    ("exopd", "gopd:ExOpd", "G-OPD with lambda 1.25: beyond the teacher"),
    ("sft", "sft:SupervisedFineTuning", "cross-entropy on given answers"),
    ("reference_kl", "reference_kl:ReferenceKl", "a penalty for leaving a reference model"),
    ("vopd", "vopd:Vopd", "sampled distillation with the KL as control variate"),
    ("poweropd", "poweropd:PowerOpd", "sampled distillation with a Box-Cox reward"),
    ("reopold", "reopold:Reopold", "sampled distillation with a floor under the reward, in two phases"),
    ("tropd", "tropd:Tropd", "sampled distillation in a trust region, forward KL outside"),
    ("tip", "tip:TokenSelection", "distillation on the tokens with the highest entropy or divergence"),
]:
    OBJECTIVES.add(name, f"student.methods.{path}", summary)

for name, path, summary in [
    ("expert_rows", "expert_rows:ExpertRows", "given answers among the sampled ones: GKD's mix, cold start"),
    ("adwin", "adwin:Adwin", "the shortest rollout window whose gradient points where the full one does"),
    ("fixed_window", "windows:FixedWindow", "train on a fixed prefix of each response (TOPD)"),
    ("first_n", "windows:FirstN", "train on the first N tokens (ESR)"),
    ("staircase", "windows:Staircase", "a rollout window that grows by stairs (POPD)"),
    ("linear_window", "windows:LinearWindow", "a rollout window that grows in a straight line"),
    ("prune_opd", "prune_opd:PruneOpd", "end responses where student and teacher have drifted apart"),
    ("effopd", "effopd:EffOpd", "jump along the path of the weights, as long as a gate accepts"),
    ("mask_tokens", "mask_tokens:MaskTokens", "leave special tokens out of every loss"),
]:
    CONTROLLERS.add(name, f"student.methods.{path}", summary)
