"""The names of tasks and verifiers."""

from opd.registry import Registry

TASKS = Registry("task", "opd.tasks", member="Options")
TASKS.add("addition", "opd.tasks.arithmetic:Addition", "sums with column sums as scratch work")
TASKS.add("subtraction", "opd.tasks.arithmetic:Subtraction", "differences with digits and borrows as scratch work")
TASKS.add(
    "multiplication",
    "opd.tasks.arithmetic:Multiplication",
    "a number times a digit, with column products as scratch work",
)
TASKS.add("running_sum", "opd.tasks.traces:RunningSum", "a long trace that repeats one skill: running totals")
TASKS.add("restate", "opd.tasks.traces:Restate", "a sum whose result is restated: the tail follows from the prefix")
TASKS.add("parts", "opd.tasks.traces:Parts", "several problems of different kinds: every part needs its own skill")
TASKS.add("sorting", "opd.tasks.sorting:Sorting", "letters put in order, with every step of an insertion sort")
TASKS.add("reasoning_gym", "opd.tasks.gym:ReasoningGym", "any dataset of reasoning-gym with its own verifier")
TASKS.add("lock", "opd.tasks.environments.lock:Lock", "episodes at a lock of digits, with states to recover from")
TASKS.add("rooms", "opd.tasks.environments.rooms:Rooms", "episodes in rooms with keys and locked doors")
TASKS.add("textworld", "opd.tasks.environments.textworld:TextWorld", "episodes in games of TextWorld, with their paths")
TASKS.add("alfworld", "opd.tasks.environments.alfworld:ALFWorld", "episodes in ALFWorld's households, with their paths")
TASKS.add("scienceworld", "opd.tasks.environments.scienceworld:ScienceWorld", "episodes in the tasks of ScienceWorld")
TASKS.add("simulated", "opd.tasks.environments.simulated:Simulated", "episodes in worlds that a chat model simulates")

VERIFIERS = Registry("verifier", "opd.verifiers", member="verify")
VERIFIERS.add("exact", "opd.tasks.exact:ExactVerifier", "the completion equals the answer, white space aside")
VERIFIERS.add("numeric", "opd.tasks.numeric:NumericVerifier", "the last number of the completion equals the answer's")
VERIFIERS.add("json_schema", "opd.tasks.json_answer:JsonVerifier", "JSON in the completion fits the prompt's schema")
VERIFIERS.add("math", "opd.tasks.maths:MathVerifier", "mathematical equality of the final answer (math-verify)")
VERIFIERS.add(
    "reasoning_gym", "opd.tasks.gym:GymVerifier", "the check of the reasoning-gym dataset that the problem comes from"
)
VERIFIERS.add("chat_judge", "opd.tasks.judges:ChatJudge", "a grade by a chat model at an OpenAI-compatible endpoint")
VERIFIERS.add("http_judge", "opd.tasks.judges:HttpJudge", "a score by any service that speaks JSON")
VERIFIERS.add("grpc_judge", "opd.tasks.judges:GrpcJudge", "a score by any service that speaks gRPC (judge.proto)")
VERIFIERS.add("code", "opd.tasks.code:CodeVerifier", "the program passes the prompt's tests, run in a sandbox")
VERIFIERS.add(
    "code_lenient",
    "opd.tasks.code:LenientCodeVerifier",
    "like code, but a program that was killed is unknown, not wrong",
)
