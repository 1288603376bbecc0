"""Chat templates in the manner of four families, shortened: what they write between turns is what the originals write.

Compared against the originals as text: Qwen2.5 and Qwen3-Instruct-2507 (append-only), Qwen3 (takes thinking out of
earlier turns and adds an empty block), Llama 3.1 (trims, has a role of its own for results, quotes them). Hermes has
ChatML with Qwen's calls.
"""

from dataclasses import dataclass
from typing import Any

_TOOLS = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}"""
_RESULTS = """\
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}{%- endfor %}"""

QWEN_INSTRUCT = (
    _TOOLS
    + """\
{%- for message in messages %}
{%- if message.role == 'user' or message.role == 'assistant' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"""
    + _RESULTS
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

QWEN3 = (
    _TOOLS
    + """\
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
{%- if ns.searching and message.role == 'user' and not message.content.startswith('<tool_response>') %}
{%- set ns.searching = false %}{%- set ns.last = messages|length - 1 - loop.index0 %}
{%- endif %}{%- endfor %}
{%- for message in messages %}{%- set content = message.content %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{%- set thought = '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- content }}{%- endif %}{{- '<|im_end|>\\n' }}"""
    + _RESULTS
    + """\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
)

LLAMA = """\
{{- bos_token }}{%- set turns = messages %}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}{%- set turns = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: 26 Jul 2024\\n\\n' + system + '<|eot_id|>' }}
{%- for message in turns %}
{%- if message.role == 'tool' %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{{- message.content | tojson }}{{- '<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if tools and loop.first %}{{- 'Given the following functions\\n\\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}{%- endif %}
{{- message.content | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

GEMMA = """\
{{- bos_token }}{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{%- endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{{- message.content | trim + '<end_of_turn>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""


@dataclass(frozen=True)
class Family:
    """A chat template with its special tokens.

    Attributes:
        template: Jinja.
        end: token that ends a turn.
        specials: further special tokens.
        appends: whether adding a turn leaves earlier ones as they were.
    """

    template: str
    end: str
    specials: tuple[str, ...]
    appends: bool = True


FAMILIES = {
    "qwen-instruct": Family(QWEN_INSTRUCT, "<|im_end|>", ("<|im_start|>", "<|endoftext|>")),
    "qwen3": Family(QWEN3, "<|im_end|>", ("<|im_start|>", "<|endoftext|>"), appends=False),
    "llama-3.1": Family(LLAMA, "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>")),
    "gemma-3": Family(GEMMA, "<end_of_turn>", ("<start_of_turn>", "<bos>")),
}


def family_tokenizer(family: Family) -> Any:
    """A byte-level tokenizer with merges, so that a text cut elsewhere has other ids, and the family's template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = [family.end, *family.specials]
    pieces = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pairs = [
        ("a", "a"),
        ("\u010a", "\u010a"),
        ("\u0120", "a"),
        ("\u010a", "a"),
        ("a", "\u010a"),
        ("o", "k"),
        ("i", "s"),
    ]
    pieces += ["".join(pair) for pair in pairs]
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in specials])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=specials[-1], eos_token=family.end, pad_token=specials[-1]
    )
    tokenizer.chat_template = family.template
    return tokenizer
