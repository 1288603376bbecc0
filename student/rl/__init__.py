"""Reinforcement learning on the same loop: rewards, advantage estimators and the terms that use them, by name."""

from opd.registry import Registry
from student.controllers import CONTROLLERS
from student.learning.terms import OBJECTIVES

__all__ = ["ADVANTAGES", "CONTROLLERS", "OBJECTIVES", "REWARDS"]

ADVANTAGES = Registry("advantage", "opd.advantages", member="settings_type")
REWARDS = Registry("reward", "opd.rewards", member="settings_type")

for name, path, summary in [
    (
        "group_mean",
        "advantages.group_mean:GroupMean",
        "reward minus the group's mean, by default divided by its deviation (GRPO)",
    ),
    ("reinforce", "advantages.reinforce:Reinforce", "reward minus a constant"),
    (
        "lite_ppo",
        "advantages.batch_scale:LitePpo",
        "reward minus the group's mean, divided by the deviation of the batch (Lite PPO)",
    ),
    ("reinforce_pp", "advantages.batch_scale:ReinforcePp", "reward normalised over the whole batch (REINFORCE++)"),
    ("ngrpo", "advantages.ngrpo:Ngrpo", "GRPO with virtual rows of the best reward: all-wrong groups are learnt from"),
    ("signed", "advantages.signed:Signed", "fixed credit for right and for wrong answers: PSR, NSR, W-REINFORCE"),
    ("opmd", "advantages.shifted:Opmd", "reward minus the group's mean or soft maximum, for mirror descent (OPMD)"),
    ("asym_re", "advantages.shifted:AsymRe", "reward minus a shifted group mean (AsymRE)"),
    (
        "rec_balance",
        "advantages.rec_balance:RecBalance",
        "reward minus the mean, after surplus wrong answers are dropped (REC)",
    ),
    (
        "mc_grpo",
        "advantages.mc_grpo:McGrpo",
        "reward minus the group's median, divided by the median absolute deviation (MC-GRPO)",
    ),
    ("bnpo", "advantages.bnpo:Bnpo", "centred reward divided by a beta density fitted to the batch (BNPO)"),
    ("lpo", "advantages.lpo:Lpo", "the weight of each response in a listwise target minus that in the policy (LPO)"),
    ("pacs", "advantages.lpo:Pacs", "the derivative of a cross-entropy on right and wrong answers of the group (PACS)"),
    ("gae", "advantages.gae:Gae", "credit per token from a critic's values (GAE)"),
    ("drpo", "advantages.drpo:Drpo", "separates right from wrong answers and favours short right ones (DRPO)"),
    (
        "tracker",
        "advantages.tracker:Tracker",
        "reward minus the prompt's average in earlier steps, for single answers (MSSR)",
    ),
    ("prompt_value", "advantages.prompt_value:PromptValue", "reward minus a critic's value of the prompt (A-LoL)"),
    (
        "gc_opd",
        "advantages.gc_opd:GcOpd",
        "a teacher's log-ratio per token, corrected where teacher and verifier rank answers differently (GC-OPD)",
    ),
    (
        "r2_opd",
        "advantages.r2_opd:R2Opd",
        "a teacher's log-ratio per token, shifted to tokens where the verdict agrees (R2-OPD)",
    ),
    (
        "noisy_forward",
        "advantages.noisy_forward:NoisyForward",
        "weights that depend on how often the verifier refuses right answers (forward correction)",
    ),
    (
        "weighted_grpo",
        "advantages.emphasis:WeightedGrpo",
        "modifier: more weight for rare outcomes of a prompt (weighted GRPO)",
    ),
    (
        "entropy_shaping",
        "advantages.emphasis:EntropyShaping",
        "modifier: more credit for tokens at which the student is uncertain (MSSR, FunRL)",
    ),
    ("ace", "advantages.modifiers:Ace", "modifier: more weight for confident errors (ACE)"),
    ("sngs", "advantages.modifiers:Sngs", "modifier: less weight for errors in groups that rarely succeed (SNGS)"),
    (
        "outliers",
        "advantages.modifiers:Outliers",
        "modifier: standardises over the batch and drops credit beyond 3 sigma",
    ),
    (
        "trloo",
        "advantages.turns:Trloo",
        "the return of each turn minus the mean of the other episodes at that turn (TRLOO)",
    ),
    (
        "archer",
        "advantages.archer:Archer",
        "the advantage of each turn, from the values of method archer_critic (ArCHer)",
    ),
    ("hiper", "advantages.hiper:Hiper", "separate advantages for subgoals, actions and switches (HiPER)"),
    ("mapo", "advantages.turns:Mapo", "the return of each turn, normalised over its group and over the step (MAPO)"),
    (
        "gigpo",
        "advantages.gigpo:Gigpo",
        "credit of the episode plus credit of each turn among turns at the same state (GiGPO)",
    ),
    (
        "a2tgpo",
        "advantages.a2tgpo:A2tgpo",
        "the information gain of each turn, normalised per turn and over depth (A2TGPO)",
    ),
    ("matchtir", "advantages.matchtir:MatchTir", "half the credit from the episode, half from each turn (MatchTIR)"),
    ("dr_mas", "advantages.dr_mas:DrMas", "reward normalised over the rows of the same agent (Dr. MAS)"),
    ("leave_one_out", "advantages.leave_one_out:LeaveOneOut", "reward minus the mean of the rest of the group (RLOO)"),
]:
    ADVANTAGES.add(name, f"student.rl.{path}", summary)

for name, path, summary in [
    (
        "policy_gradient",
        "losses.policy_gradient:PolicyGradient",
        "a policy gradient with any advantage, importance ratio and clip",
    ),
    ("grpo", "losses.grpo:Grpo", "group-relative policy optimisation on a verifier's reward"),
    ("entropy_bonus", "losses.entropy_bonus:EntropyBonus", "a bonus for the student's entropy, computed exactly"),
    ("ppo", "losses.variants:Ppo", "PPO, with the values of method critic"),
    ("gspo", "losses.variants:Gspo", "GRPO with one importance ratio per response and a narrow clip (GSPO)"),
    (
        "dapo",
        "losses.variants:Dapo",
        "GRPO with a higher upper clip, averaged over tokens, without equal groups and cut answers (DAPO)",
    ),
    ("dr_grpo", "losses.variants:DrGrpo", "GRPO without the biases from dividing by deviation and length (Dr. GRPO)"),
    ("cispo", "losses.weighted:Cispo", "REINFORCE with a capped importance weight (CISPO)"),
    (
        "dispo",
        "losses.weighted:Dispo",
        "REINFORCE with importance weights bounded separately for right and wrong answers (DISPO)",
    ),
    ("topr", "losses.weighted:Topr", "REINFORCE in which wrong answers count less as they become unlikely (TOPR)"),
    (
        "minpro",
        "losses.weighted:Minpro",
        "REINFORCE weighted by the token's ratio times the smallest earlier one (MinPRO)",
    ),
    (
        "stable_reinforce",
        "losses.guarded:StableReinforce",
        "the clipped loss with log-ratios clamped against overflow (StableReinforce)",
    ),
    ("dhpo", "losses.guarded:Dhpo", "a mixture of the clipped ratios by token and by response (DHPO)"),
    ("rec", "losses.guarded:Rec", "REINFORCE that drops tokens whose ratio is too far from 1 (REC)"),
    ("minirl", "losses.guarded:Minirl", "REINFORCE corrected for staleness and for the engine's numerics (MiniRL)"),
    (
        "mixed_context",
        "losses.mixed:MixedContext",
        "the clipped loss on sampled rows, a shaped ratio on hinted ones (ICPO, Guide, LTE)",
    ),
    (
        "rl_plus",
        "losses.mixed:RlPlus",
        "learns given answers with a ratio to a mixture, unlikely tokens first (RL-PLUS)",
    ),
    (
        "entropic",
        "losses.entropic:Entropic",
        "the clipped loss with a controller that holds the entropy at a target (EntroPIC)",
    ),
    ("epo", "losses.epo:Epo", "an entropy bonus with a penalty outside a band around earlier entropies (EPO)"),
    ("rapo_kl", "losses.rapo:RapoKl", "forward KL to a reference that is flattened for bad answers (RAPO)"),
    ("mimo_mix", "losses.teacher_mix:MimoMix", "a teacher's log-ratio per token plus the credit of the outcome (MiMo)"),
    ("glm_mix", "losses.teacher_mix:GlmMix", "a teacher's log-ratio per token in a clipped loss (GLM-5)"),
    (
        "rlsd",
        "losses.rlsd:Rlsd",
        "the clipped loss with credit weighted per token by a teacher that has read the solution (RLSD)",
    ),
    (
        "a2tgpo",
        "losses.a2tgpo:A2tgpoLoss",
        "the clipped loss with a wider clip for turns that contribute more (A2TGPO)",
    ),
    ("otr", "losses.given_tokens:Otr", "cross-entropy on given tokens, weighted by their probability (OTR)"),
    ("chord", "losses.given_tokens:Chord", "cross-entropy on given tokens, weighted by p (1 - p) (CHORD)"),
    ("asft", "losses.asft:Asft", "cross-entropy on given tokens, with more weight on actions (GUI-Libra's ASFT)"),
    ("rover", "losses.rover:Rover", "fits log-ratios to the reward plus the next token's mean log-ratio (ROVER)"),
    (
        "a_lol",
        "losses.a_lol:ALol",
        "learns answers better than their prompt's value, weighted by a ratio to a reference (A-LoL)",
    ),
    (
        "dapo_direct",
        "losses.direct_advantage:DirectAdvantage",
        "fits the log-ratio of each reasoning step to its advantage (Direct Advantage PO)",
    ),
    ("safe", "losses.safe:Safe", "the clipped loss with a penalty on the KL above a moving threshold (SAFE)"),
    ("alp", "losses.alp:Alp", "the clipped loss of a student with noise of learnt size in every layer (ALP)"),
    ("rloo", "losses.rloo:Rloo", "REINFORCE with a leave-one-out baseline on a verifier's reward"),
]:
    OBJECTIVES.add(name, f"student.rl.{path}", summary)

for name, path, summary in [
    ("overlong", "overlong:Overlong", "a penalty that grows over the last tokens before the length limit (DAPO)"),
    ("cosine_length", "cosine_length:CosineLength", "a reward that depends on the answer's length along a cosine"),
    ("hapo", "hapo:Hapo", "a bonus for correct answers shorter than the prompt's shortest so far (HAPO)"),
    ("dler", "dler:Dler", "the verdict, and 0 for an answer that the length limit cut (DLER)"),
    (
        "rl_struct",
        "rl_struct:RlStruct",
        "a tiered reward for structure, format, validity and correctness of a JSON answer (RL-Struct)",
    ),
    ("noisy_verifier", "noisy_verifier:NoisyVerifier", "the verdict corrected for a verifier's known error rates"),
    ("ttrv", "ttrv:Ttrv", "the share of samples that agree with an answer, without labels (TTRV)"),
    ("rlpr", "rlpr:Rlpr", "the student's own probability of the reference answer after its reasoning (RLPR)"),
    ("igpo", "igpo:Igpo", "rewards each turn by what it adds to the probability of the right answer (IGPO)"),
    ("toolrl", "toolrl:ToolRl", "how well tool calls match reference calls (ToolRL)"),
    ("matchtir", "matchtir:MatchTir", "rewards each turn by how well its tool calls match reference calls (MatchTIR)"),
    ("trustee", "trustee:TrusteeReward", "the judge's reward in a simulated world (TRUSTEE)"),
    (
        "profiling",
        "profiling:Profiling",
        "rewards each turn by correctness, speed-up and profiled coverage (Dr.Kernel's PR)",
    ),
    ("tulu3", "tulu3:Tulu3", "10 for a right answer, minus 10 for an unfinished one (Tulu 3 RLVR)"),
    ("kl_penalty", "by_token:KlPenalty", "per token: minus the log-ratio to the reference (PPO's KL in the reward)"),
    ("rto", "by_token:Rto", "per token: the log-ratio of a DPO model to the reference (RTO)"),
    ("text2grad", "text2grad:Text2Grad", "per token: parts that a judge quotes as good or bad (Text2Grad)"),
    ("appeals", "appeals:Appeals", "lets a judge re-examine refused answers, to measure how often the verifier errs"),
    ("judge", "judge:Judge", "a grade from a chat model at an OpenAI-compatible endpoint"),
    ("http_judge", "judge:HttpJudge", "a score from any HTTP service that speaks JSON"),
    ("grpc_judge", "judge:GrpcJudge", "a score from any gRPC service (judge.proto)"),
    (
        "checklist",
        "checklist:Checklist",
        "the share of a prompt's constraints that a judge finds satisfied (ACE-RL)",
    ),
    ("function", "function:FunctionReward", "a Python function of prompt and answer, named by dotted path"),
]:
    REWARDS.add(name, f"student.rl.rewards.{path}", summary)

for name, path, summary in [
    ("random_prompts", "random_prompts:RandomPrompts", "a null arm: chooses prompts at random"),
    (
        "mopps",
        "mopps:Mopps",
        "chooses prompts whose success rate, drawn from a posterior, is nearest to a target (MoPPS)",
    ),
    (
        "gps",
        "gps:Gps",
        "chooses prompts whose success rate, predicted by a small generative model, is nearest to a target (GPS)",
    ),
    (
        "pcl",
        "pcl:Pcl",
        "chooses prompts whose value, predicted from the student's states, is nearest to a target (PCL)",
    ),
    (
        "depth_curriculum",
        "depth_curriculum:DepthCurriculum",
        "a curriculum of composed prompts of growing depth (Composition-RL)",
    ),
    ("sec", "sec:Sec", "a bandit over kinds of prompts, rewarded by how much is learnt from each (SEC)"),
    (
        "positive_negative",
        "pairing:Pairing",
        "half of a step from prompts that rarely succeed, half from prompts that rarely fail",
    ),
    ("drive", "drive:Drive", "phases that keep the hardest prompts, with more answers to each (DRIVE's Pre-GRPO)"),
    ("stages", "stages:Stages", "stages with their own domains and answer lengths (AceReason-Nemotron)"),
    ("prompt_gdro", "gdro:PromptGdro", "weights prompts by how hard their class is (Prompt-GDRO)"),
    (
        "rollout_gdro",
        "gdro:RolloutGdro",
        "sets the number of answers to a prompt by the variance of its class (Rollout-GDRO)",
    ),
    (
        "prompt_augmentation",
        "prompt_augmentation:PromptAugmentation",
        "asks each prompt through one of several templates, chosen at random",
    ),
]:
    CONTROLLERS.add(name, f"student.rl.samplers.{path}", summary)

for name, path, summary in [
    (
        "archer_critic",
        "archer:ArcherCritic",
        "twin Q and V heads of turns, fitted off policy, for advantage archer (ArCHer)",
    ),
    (
        "hiper_critic",
        "hiper:HiperCritic",
        "value heads for subgoals, actions and switches, for advantage hiper (HiPER)",
    ),
    ("critic", "critic:Critic", "value heads on the student's features, for advantage gae"),
    ("seeupo", "seeupo:SeeUpo", "makes a separate update for each turn of the episodes, the last one first (SeeUPO)"),
    (
        "routing_replay",
        "routing_replay:RoutingReplay",
        "replays the experts that the rollout or the old policy chose (R3, R2)",
    ),
    ("mrs", "mrs:Mrs", "leaves out answers on which sampler and trainer disagree (MRS)"),
    ("prs", "prs:Prs", "drops most correct turns whose own code takes little of the run time (Dr.Kernel's PRS)"),
    ("update_sparsity", "update_sparsity:UpdateSparsity", "measures the share of weights that training has not moved"),
]:
    CONTROLLERS.add(name, f"student.rl.{path}", summary)
