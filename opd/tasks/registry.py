"""The names of tasks and verifiers."""

from opd.registry import Registry

TASKS = Registry(
    "task",
    "opd.tasks",
    member="Options",
    names={
        "addition": "opd.tasks.arithmetic:Addition",
        "subtraction": "opd.tasks.arithmetic:Subtraction",
        "multiplication": "opd.tasks.arithmetic:Multiplication",
        "reasoning_gym": "opd.tasks.gym:ReasoningGym",
        "lock": "opd.tasks.environments.lock:Lock",
    },
)

VERIFIERS = Registry(
    "verifier",
    "opd.verifiers",
    member="verify",
    names={
        "exact": "opd.tasks.equal:ExactVerifier",
        "numeric": "opd.tasks.equal:NumericVerifier",
        "contains": "opd.tasks.stated:ContainsVerifier",
        "choice": "opd.tasks.stated:ChoiceVerifier",
        "regex": "opd.tasks.stated:RegexVerifier",
        "json_schema": "opd.tasks.json_answer:JsonVerifier",
        "math": "opd.tasks.maths:MathVerifier",
        "reasoning_gym": "opd.tasks.gym:GymVerifier",
        "chat_judge": "opd.tasks.judges:ChatJudge",
        "http_judge": "opd.tasks.judges:HttpJudge",
        "grpc_judge": "opd.tasks.judges:GrpcJudge",
        "code": "opd.tasks.code:CodeVerifier",
        "code_lenient": "opd.tasks.code:LenientCodeVerifier",
    },
)
