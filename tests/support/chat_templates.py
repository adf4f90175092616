"""Small chat templates that do to earlier turns, to reasoning and to a chat's end what those of well-known models
do."""

from __future__ import annotations

QWEN3 = (
    "{%- if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n{% "
    "endif %}"
    "{%- set found = namespace(last=messages | length - 1, open=true) %}"
    "{%- for message in messages[::-1] %}"
    "{%- if found.open and message.role == 'user' and not message.content.startswith('<tool_response>') %}"
    "{%- set found.open = false %}{%- set found.last = messages | length - 1 - loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}"
    "{%- if message.role in ('user', 'system') %}{{- '<|im_start|>' + message.role + '\n' + message.content + "
    "'<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}{{- '<|im_start|>user\n<tool_response>\n' + message.content + "
    "'\n</tool_response><|im_end|>\n' }}"
    "{%- else %}{%- set thought, content = message.reasoning_content or '', message.content %}"
    "{%- if '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > found.last and (loop.last or thought) %}"
    "{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{%- endif %}"
    "{{- content }}"
    "{%- for call in message.tool_calls or [] %}"
    '{{- \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}{{ call.function.arguments | tojson }}'  # noqa: E501
    "{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- "
    "endif %}"
)
"""Only answers after the last question keep their reasoning; the last message always has a block of it, if an empty
one."""
QWEN3_5 = QWEN3.replace(
    "'<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}",
    "'<think>\n\n</think>\n\n' }}{%- else %}{{- '<think>\n' }}{%- endif %}{%- endif %}",
)
"""The generation prompt begins the block of reasoning."""
PHI_3 = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
"""Every chat that asks for no answer ends with EOS."""
GPT_OSS = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}<|end|>"
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}"
    "{%- if loop.last and not add_generation_prompt %}"
    "{%- if message.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' "
    "}}{%- endif %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}"
    "{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{%- endif %}"
    "{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}<|start|>assistant{%- endif %}"
)
"""The last answer ends with another token than earlier ones."""
SHIPPED = {"qwen3": QWEN3, "qwen3.5": QWEN3_5, "phi-3": PHI_3, "gpt-oss": GPT_OSS}
SPECIALS = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
    *("<|start|>", "<|message|>", "<|channel|>", "<|return|>"),
)
