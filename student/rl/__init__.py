"""Reinforcement learning on the same loop: rewards, advantage estimators and the terms that use them, by name."""

from opd.registry import Registry
from student.controllers import CONTROLLERS
from student.learning.terms import OBJECTIVES

__all__ = ["ADVANTAGES", "CONTROLLERS", "OBJECTIVES", "REWARDS"]

ADVANTAGES = Registry("advantage", "opd.advantages", member="settings_type")
REWARDS = Registry("reward", "opd.rewards", member="settings_type")

for name, path, summary in [
    ("group_mean", "advantages.group_mean:GroupMean", "reward minus the group's mean, by default over its deviation"),
    ("reinforce", "advantages.reinforce:Reinforce", "reward minus a constant"),
    ("lite_ppo", "advantages.batch_scale:LitePpo", "reward minus the group's mean, over the batch's deviation"),
    ("reinforce_pp", "advantages.batch_scale:ReinforcePp", "reward normalised over the whole batch (REINFORCE++)"),
    ("ngrpo", "advantages.ngrpo:Ngrpo", "GRPO with virtual rows of the best reward: all-wrong groups are learnt from"),
    ("signed", "advantages.signed:Signed", "right and wrong answers by fixed weights: PSR, NSR, W-REINFORCE"),
    ("opmd", "advantages.shifted:Opmd", "reward minus the group's mean or soft maximum, for mirror descent"),
    ("asym_re", "advantages.shifted:AsymRe", "reward minus a shifted group mean (AsymRE)"),
    (
        "rec_balance",
        "advantages.rec_balance:RecBalance",
        "reward minus the mean of as many wrong as right answers (REC)",
    ),
    ("mc_grpo", "advantages.mc_grpo:McGrpo", "reward against the group's median and absolute deviation"),
    ("bnpo", "advantages.bnpo:Bnpo", "centred reward over a beta density fitted to the batch"),
    ("lpo", "advantages.lpo:Lpo", "a listwise target's weight minus the policy's, for each response"),
    ("pacs", "advantages.lpo:Pacs", "the slope of a cross-entropy on right and wrong, over the group"),
    ("gae", "advantages.gae:Gae", "credit by token from a critic's values (GAE)"),
    ("drpo", "advantages.drpo:Drpo", "right answers separated from wrong ones, short right ones first (DRPO)"),
    ("tracker", "advantages.tracker:Tracker", "reward minus the prompt's own past, for single answers (MSSR)"),
    ("prompt_value", "advantages.prompt_value:PromptValue", "reward minus a critic's value of the prompt (A-LoL)"),
    ("gc_opd", "advantages.gc_opd:GcOpd", "a teacher's log-ratio by token, moved where the verifier ranks otherwise"),
    (
        "r2_opd",
        "advantages.r2_opd:R2Opd",
        "a teacher's log-ratio by token, more of it where the verifier agrees (R2-OPD)",
    ),
    ("noisy_forward", "advantages.noisy_forward:NoisyForward", "weights by how often right answers are refused"),
    ("weighted_grpo", "advantages.emphasis:WeightedGrpo", "modifier: rare outcomes of a prompt weigh more"),
    ("entropy_shaping", "advantages.emphasis:EntropyShaping", "modifier: uncertain tokens weigh more (MSSR, FunRL)"),
    ("ace", "advantages.modifiers:Ace", "modifier: confident errors weigh more"),
    ("sngs", "advantages.modifiers:Sngs", "modifier: errors weigh less where a group rarely succeeds"),
    ("outliers", "advantages.modifiers:Outliers", "modifier: standardise over the batch, drop what is beyond 3 sigma"),
    ("trloo", "advantages.turns:Trloo", "returns by turn, against the other episodes at that turn (TRLOO)"),
    ("archer", "advantages.archer:Archer", "the advantage of each turn by method archer_critic (ArCHer)"),
    ("hiper", "advantages.hiper:Hiper", "subgoals, actions and switches, each by its own advantage (HiPER)"),
    ("mapo", "advantages.turns:Mapo", "returns by turn, over the turn's group and over the step (MAPO)"),
    ("gigpo", "advantages.gigpo:Gigpo", "the episode's credit, and each turn's among turns at the same state (GiGPO)"),
    ("a2tgpo", "advantages.a2tgpo:A2tgpo", "gains of turns, normalised by turn and evened out over depth (A2TGPO)"),
    ("matchtir", "advantages.matchtir:MatchTir", "half the credit of the episode, half of its turns (MatchTIR)"),
    ("dr_mas", "advantages.dr_mas:DrMas", "each agent of an episode against itself alone (Dr. MAS)"),
    ("leave_one_out", "advantages.leave_one_out:LeaveOneOut", "reward minus the mean of the rest of the group"),
]:
    ADVANTAGES.add(name, f"student.rl.{path}", summary)

for name, path, summary in [
    (
        "policy_gradient",
        "losses.policy_gradient:PolicyGradient",
        "a policy gradient with any advantage, ratio and clip",
    ),
    ("grpo", "losses.grpo:Grpo", "group-relative policy optimisation on a verifier's reward"),
    ("entropy_bonus", "losses.entropy_bonus:EntropyBonus", "a bonus on the student's exact entropy"),
    ("ppo", "losses.variants:Ppo", "PPO with method critic"),
    ("gspo", "losses.variants:Gspo", "GRPO with one ratio per response and a narrow clip"),
    ("dapo", "losses.variants:Dapo", "GRPO with a higher upper clip, by token, without equal groups and cut answers"),
    ("dr_grpo", "losses.variants:DrGrpo", "GRPO without the biases of deviation and length"),
    ("cispo", "losses.weighted:Cispo", "REINFORCE with a capped importance weight"),
    (
        "dispo",
        "losses.weighted:Dispo",
        "REINFORCE with importance weights bounded separately for right and wrong answers",
    ),
    ("topr", "losses.weighted:Topr", "REINFORCE whose wrong answers taper off as they become rare"),
    ("minpro", "losses.weighted:Minpro", "REINFORCE weighted by the ratio and the least one before it"),
    ("stable_reinforce", "losses.guarded:StableReinforce", "the clipped loss on log-ratios that cannot overflow"),
    ("dhpo", "losses.guarded:Dhpo", "a mix of the clipped ratios by token and by response"),
    ("rec", "losses.guarded:Rec", "REINFORCE without tokens whose ratio has gone too far"),
    ("minirl", "losses.guarded:Minirl", "REINFORCE corrected for staleness and for the engine's numerics"),
    (
        "mixed_context",
        "losses.mixed:MixedContext",
        "a clip on sampled rows, a shaped ratio on hinted ones",
    ),
    ("rl_plus", "losses.mixed:RlPlus", "given answers by a ratio to a mixture, unlikely tokens first (RL-PLUS)"),
    ("entropic", "losses.entropic:Entropic", "the clipped loss with a controller that holds the entropy (EntroPIC)"),
    ("epo", "losses.epo:Epo", "an entropy bonus with a band around the entropy of earlier steps (EPO)"),
    ("rapo_kl", "losses.rapo:RapoKl", "forward KL to a reference, flatter the worse the answer (RAPO)"),
    ("mimo_mix", "losses.teacher_mix:MimoMix", "a teacher's log-ratio by token plus the outcome's credit (MiMo)"),
    ("glm_mix", "losses.teacher_mix:GlmMix", "a teacher's log-ratio by token in a clipped loss (GLM-5)"),
    ("rlsd", "losses.rlsd:Rlsd", "a clipped loss whose credit a teacher with the solution weighs by token (RLSD)"),
    ("a2tgpo", "losses.a2tgpo:A2tgpoLoss", "a clip that is wider for turns that add more to the answer (A2TGPO)"),
    ("otr", "losses.given_tokens:Otr", "given tokens weighted by their probability (one-token rollouts)"),
    ("chord", "losses.given_tokens:Chord", "given tokens weighted by p (1 - p) (CHORD)"),
    ("asft", "losses.asft:Asft", "given tokens, those of an action weighing more (GUI-Libra's ASFT)"),
    ("rover", "losses.rover:Rover", "log-ratios fitted to rewards and to the next token's mean log-ratio (ROVER)"),
    ("a_lol", "losses.a_lol:ALol", "answers above their prompt's value, by a ratio to a reference (A-LoL)"),
    (
        "dapo_direct",
        "losses.direct_advantage:DirectAdvantage",
        "a squared loss by reasoning step (Direct Advantage PO)",
    ),
    ("safe", "losses.safe:Safe", "the clipped loss with a KL held below a moving threshold (SAFE)"),
    ("alp", "losses.alp:Alp", "the clipped loss of a student under noise of a learnt size in every layer (ALP)"),
    ("rloo", "losses.rloo:Rloo", "REINFORCE with a leave-one-out baseline on a verifier's reward"),
]:
    OBJECTIVES.add(name, f"student.rl.{path}", summary)

for name, path, summary in [
    ("overlong", "overlong:Overlong", "a penalty that grows over the last tokens before the length limit (DAPO)"),
    ("cosine_length", "cosine_length:CosineLength", "right and wrong answers by their length, along a cosine"),
    ("hapo", "hapo:Hapo", "a bonus for correct answers shorter than the prompt's shortest so far"),
    ("dler", "dler:Dler", "correctness, and nothing for an answer that the length limit cut"),
    ("rl_struct", "rl_struct:RlStruct", "tiers of structure, format, validity and correctness of a JSON answer"),
    ("noisy_verifier", "noisy_verifier:NoisyVerifier", "the verdict corrected for a verifier's known error rates"),
    ("ttrv", "ttrv:Ttrv", "how many samples agree with an answer, without labels"),
    ("rlpr", "rlpr:Rlpr", "the student's own probability of the reference answer after its reasoning"),
    ("igpo", "igpo:Igpo", "turns by what they add to the belief in the right answer (IGPO)"),
    ("toolrl", "toolrl:ToolRl", "how well tool calls match reference calls (ToolRL)"),
    ("matchtir", "matchtir:MatchTir", "turns by how well their tool calls match reference calls (MatchTIR)"),
    ("trustee", "trustee:TrusteeReward", "what the judge of a simulated world gave (TRUSTEE)"),
    ("profiling", "profiling:Profiling", "turns by correctness, speed-up and profiled coverage (Dr.Kernel's PR)"),
    ("tulu3", "tulu3:Tulu3", "ten for a right answer, minus ten for an unfinished one (Tulu 3 RLVR)"),
    ("kl_penalty", "by_token:KlPenalty", "by token: minus the log-ratio to the reference (PPO's KL in the reward)"),
    ("rto", "by_token:Rto", "by token: the log-ratio of a DPO model to the reference (RTO)"),
    ("text2grad", "text2grad:Text2Grad", "by token: what a judge quotes as good or bad (Text2Grad)"),
    ("appeals", "appeals:Appeals", "a judge looks again at refused answers, to learn how often the verifier errs"),
    ("judge", "judge:Judge", "a grade by a chat model at an OpenAI-compatible endpoint"),
    ("http_judge", "judge:HttpJudge", "a score by any service that speaks JSON"),
    ("grpc_judge", "judge:GrpcJudge", "a score by any service that speaks gRPC (judge.proto)"),
    (
        "checklist",
        "checklist:Checklist",
        "the share of a prompt's constraints that a judge finds satisfied (ACE-RL)",
    ),
    ("function", "function:FunctionReward", "a plain function of prompt and answer, by dotted path"),
]:
    REWARDS.add(name, f"student.rl.rewards.{path}", summary)

for name, path, summary in [
    ("random_prompts", "random_prompts:RandomPrompts", "the null of samplers: a random choice"),
    ("mopps", "mopps:Mopps", "prompts whose success rate, drawn from a posterior, is nearest to a target"),
    ("gps", "gps:Gps", "prompts whose success a small generative model predicts to be nearest to a target"),
    ("pcl", "pcl:Pcl", "prompts whose value, predicted from the student's states, is nearest to a target (PCL)"),
    ("depth_curriculum", "depth_curriculum:DepthCurriculum", "composed prompts of growing depth (Composition-RL)"),
    ("sec", "sec:Sec", "a bandit over kinds of prompts, paid by how much is learnt from each"),
    ("positive_negative", "pairing:Pairing", "half of a step hardly ever solved, half hardly ever failed"),
    ("drive", "drive:Drive", "phases that keep the hardest prompts, with more answers to each (Pre-GRPO)"),
    ("stages", "stages:Stages", "domains and lengths of answers by step (AceReason-Nemotron)"),
    ("prompt_gdro", "gdro:PromptGdro", "weights of prompts by how hard their class is (Prompt-GDRO)"),
    ("rollout_gdro", "gdro:RolloutGdro", "answers to a prompt by how much its class varies (Rollout-GDRO)"),
    ("prompt_augmentation", "prompt_augmentation:PromptAugmentation", "every prompt through one of several templates"),
]:
    CONTROLLERS.add(name, f"student.rl.samplers.{path}", summary)

for name, path, summary in [
    ("archer_critic", "archer:ArcherCritic", "twin Q and V of utterances, off policy, for advantage archer (ArCHer)"),
    ("hiper_critic", "hiper:HiperCritic", "values of subgoals, actions and switches, for advantage hiper (HiPER)"),
    ("critic", "critic:Critic", "value heads on the student's features, for advantage gae"),
    ("seeupo", "seeupo:SeeUpo", "an update for each turn of the episodes, the last one first (SeeUPO)"),
    (
        "routing_replay",
        "routing_replay:RoutingReplay",
        "tokens pass the experts of the rollout or the old policy (R3, R2)",
    ),
    ("mrs", "mrs:Mrs", "leaves out answers on which sampler and trainer disagree (MRS)"),
    ("prs", "prs:Prs", "right turns whose own code hardly runs are mostly dropped (Dr.Kernel's PRS)"),
    ("update_sparsity", "update_sparsity:UpdateSparsity", "measures how many weights are left as they were"),
]:
    CONTROLLERS.add(name, f"student.rl.{path}", summary)
