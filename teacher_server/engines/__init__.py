"""Engines, which run teacher models behind the protocol `teacher_server.engines.base.Engine`.

`ENGINES` maps names to engine classes, which are called as `cls(model, **options)`. Third parties add names through the
entry-point group `opd.engines`. Listing the names imports neither torch nor any engine.
"""

from opd.registry import Registry

ENGINES = Registry("engine", "opd.engines")
ENGINES.add(
    "transformers",
    "teacher_server.engines.transformers:TransformersEngine",
    "reference: exact for every payload, on any device",
)
ENGINES.add(
    "vllm",
    "teacher_server.engines.vllm:VllmEngine",
    "vLLM in this process: sampled, topk, and gather and hidden where this vLLM has them",
)
ENGINES.add(
    "sglang",
    "teacher_server.engines.sglang:SglangEngine",
    "an SGLang server over its HTTP API: sampled and topk",
)
