"""Chat templates in the styles of three model families, and tiny tokenizers with them.

They have the habits that make a conversation's text differ from its tokens: they strip white space, drop thoughts of
earlier answers, merge system messages and tools into other turns, and leave out the text beside tool calls.
"""

import copy
from typing import Any

QWEN = """
{%- if tools or messages[0].role == 'system' -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- if tools %}

# Tools
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
{%- endif -%}
<|im_end|>
{% endif -%}
{%- set ns = namespace(last=0) -%}
{%- for message in messages if message.role == 'user' -%}{%- set ns.last = messages.index(message) -%}{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' -%}
{%- set content = message.content or '' -%}
{%- if loop.index0 < ns.last -%}{%- set content = content.split('</think>')[-1] -%}{%- endif -%}
<|im_start|>assistant
{{ content.strip() }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}<|im_start|>user{%- endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}<|im_end|>
{% endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""

LLAMA3 = """
{{- '<|begin_of_text|>' -}}
{%- if tools -%}<|start_header_id|>system<|end_header_id|>

{% for tool in tools %}{{ tool | tojson }} {% endfor -%}
Answer with {"name": function name, "parameters": dictionary}.<|eot_id|>{%- endif -%}
{%- for message in messages -%}
{%- if message.tool_calls -%}
{%- if message.tool_calls | length != 1 -%}{{ raise_exception('one call at a time') }}{%- endif -%}
{%- set call = message.tool_calls[0].function -%}
<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- elif message.role == 'tool' -%}<|start_header_id|>ipython<|end_header_id|>

{{ message.content | tojson }}<|eot_id|>
{%- else -%}<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start_header_id|>assistant<|end_header_id|>

{% endif -%}
"""

MISTRAL = """
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- set ns = namespace(last=0) -%}
{%- for message in loop_messages if message.role == 'user' -%}
{%- set ns.last = loop_messages.index(message) -%}
{%- endfor -%}
{{- '<s>' -}}
{%- for message in loop_messages -%}
{%- if message.role in ('user', 'system') -%}
{%- if tools and loop.index0 == ns.last -%}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif -%}
[INST] {% if system is defined and loop.index0 == ns.last %}{{ system }}

{% endif %}{{ message.content }}[/INST]
{%- elif message.tool_calls -%}
[TOOL_CALLS] [
{%- for call in message.tool_calls -%}
{%- if call.id | length != 9 -%}{{ raise_exception('ids of calls have nine characters') }}{%- endif -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}
{%- if not loop.last %}, {% endif -%}
{%- endfor -%}
]</s>
{%- elif message.role == 'assistant' %} {{ message.content }}</s>
{%- elif message.role == 'tool' -%}
[TOOL_RESULTS] {"content": {{ message.content | tojson }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]
{%- endif -%}
{%- endfor -%}
"""

FAMILIES = {
    "qwen": (QWEN, "<|im_end|>", []),
    "llama3": (
        LLAMA3,
        "<|eot_id|>",
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"],
    ),
    "mistral": (
        MISTRAL,
        "</s>",
        ["<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
        + ["[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
    ),
}


def tokenizer_of(family: str, plain: Any) -> Any:
    """Return a copy of a tokenizer with the special tokens and the chat template of a family."""
    template, end, others = FAMILIES[family]
    tokenizer = copy.deepcopy(plain)
    tokenizer.add_special_tokens({"eos_token": end, "additional_special_tokens": others})
    tokenizer.chat_template = template.strip("\n")
    return tokenizer
