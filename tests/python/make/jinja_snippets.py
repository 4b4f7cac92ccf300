"""Abridged chat templates with the features of published ones.

They are written for these tests, after the model cards of the families that their comments name;
only the features count, so most texts are left out.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

_CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TEMPLATES = {
    # Qwen3: thoughts of the last turn, the last question found backwards, tools
    "qwen3": """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<r>') and message.content.endswith('</r>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}{%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or reasoning_content) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
            {{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}{{- '}' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<r>\\n' + content }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}""",
    # Qwen3-Coder: a macro over keys of a schema, none that is iterable, values as text
    "qwen3-coder": """{% macro extra(json_dict, handled) %}
    {%- if json_dict is mapping %}
        {%- for key in json_dict if key not in handled %}
            {%- if json_dict[key] is mapping or (json_dict[key] is sequence and json_dict[key] is not string) %}
                {{- '\\n<' ~ key ~ '>' ~ (json_dict[key] | tojson | safe) ~ '</' ~ key ~ '>' }}
            {%- else %}{{- '\\n<' ~ key ~ '>' ~ (json_dict[key] | string) ~ '</' ~ key ~ '>' }}{%- endif %}
        {%- endfor %}
    {%- endif %}
{% endmacro %}
{%- if tools is iterable and tools | length > 0 %}
    {%- for tool in tools %}
        {%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
        {{- "\\n<name>" ~ tool.name ~ "</name>" }}
        {%- if tool.parameters is defined and tool.parameters is mapping and tool.parameters.properties is mapping %}
            {%- for name, fields in tool.parameters.properties | items %}
                {{- '\\n<parameter>' ~ name }}{{- extra(fields, ['name', 'type']) }}
            {%- endfor %}
        {%- endif %}
        {{- extra(tool, ['type', 'name', 'parameters']) }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {%- for name, value in call.function.arguments | items %}
            {{- '<parameter=' + name + '>\\n' }}
            {{- value | tojson | safe if value is mapping or (value is sequence and value is not string) else value | string }}
        {%- endfor %}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}""",
    # Llama 3.1: a date, BOS, tools in the user's message, a JSON indent
    "llama-3.1": """{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") | length %}{%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " }}{{- date_string }}{{- "\\n\\n" }}{{- system_message }}{{- "<|eot_id|>" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("only single tool-calls at once!") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}""",
    # Mistral: turns that alternate, tools before the last question
    "mistral": """{%- if messages[0]["role"] == "system" %}{%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" or (message["role"] == "assistant" and message.tool_calls is not defined) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}{{- raise_exception("roles must alternate") }}{%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}{{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}{%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}{{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}{{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {%- for call in message.tool_calls %}{%- set out = call.function|tojson %}{{- out[:-1] }}{{- ', "id": "' + (call.id or 'x') + '"}' }}{%- endfor %}{{- eos_token }}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}{{- '[TOOL_RESULTS] {"content": ' + message.content|string + "}[/TOOL_RESULTS]" }}
    {%- else %}{{- raise_exception("unknown role") }}{%- endif %}
{%- endfor %}""",
    # gpt-oss: a recursive macro over types, a filter that rejects, continue and break
    "gpt-oss": """{%- macro type_of(spec, required, nullable=false) -%}
    {%- if spec.type == "array" -%}
        {%- if spec['items'] -%}{%- if spec['items'].type == "string" -%}{{- "string[]" }}{%- else -%}{{- type_of(spec['items'], required) + "[]" }}{%- endif -%}
        {%- else -%}any[]{%- endif -%}{%- if spec.nullable -%}{{- " | null" }}{%- endif -%}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string and spec.type is not mapping and spec.type[0] is defined -%}
        {%- if spec.type | length > 1 -%}{{- spec.type | join(" | ") }}{%- else -%}{{- spec.type[0] }}{%- endif -%}
    {%- elif spec.type == "object" -%}
        {{- "{\\n" }}{%- for name, inner in (spec.properties or {}).items() -%}
            {{- name }}{%- if name not in (spec.required or []) -%}?{%- endif -%}{{- ": " }}{{ type_of(inner, spec.required or []) }}
            {%- if not loop.last -%}{{- ", " }}{%- endif -%}{%- endfor -%}{{- "}" }}
    {%- elif spec.enum -%}{{- '"' + spec.enum|join('" | "') + '"' -}}
    {%- else -%}{{- spec.type or 'any' }}{%- endif -%}
{%- endmacro -%}
{%- for tool in tools or [] %}{{- "type " + tool.function.name + " = (_: " }}{{- type_of(tool.function.parameters, []) }}{{- ") => any;\\n" }}{%- endfor %}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}{%- continue %}{%- endif -%}
    {%- if message.thinking and loop.last %}{{- "<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}{%- endif -%}
    {{- "<|start|>" + message.role + "<|message|>" + (message.content or '') + ("<|return|>" if loop.last and message.role == 'assistant' else "<|end|>") }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}""",
    # DeepSeek R1 and V3.1: thoughts cut off, states in a namespace
    "deepseek": """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{% set ns = namespace(is_first=false, is_tool=false, system_prompt='', is_last_user=false) %}{%- for message in messages %}{%- if message['role'] == 'system' %}{%- if not ns.is_first %}{% set ns.system_prompt = ns.system_prompt + message['content'] %}{%- endif %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system_prompt }}{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.is_last_user = true -%}{{'<｜User｜>' + message['content']}}{%- endif %}{%- if message['role'] == 'assistant' and message['tool_calls'] is defined and message['tool_calls'] is not none %}{%- for tool in message['tool_calls'] %}{{'<｜tool▁call▁begin｜>' + tool['function']['name'] + '\\n```json\\n' + (tool['function']['arguments'] | tojson) + '\\n```'}}{%- endfor %}{%- endif %}{%- if message['role'] == 'assistant' and message['tool_calls'] is not defined %}{% set content = message['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor -%}{% if add_generation_prompt and ns.is_last_user %}{{'<｜Assistant｜>'}}{% if thinking is defined and thinking %}{{'<think>'}}{% else %}{{'</think>'}}{% endif %}{% endif %}""",
    # GLM 4.5: a macro for visible text, tojson with arguments, strip
    "glm-4.5": """[gMASK]<sop>
{%- macro visible_text(content) -%}
    {%- if content is string -%}{{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}{%- if item is mapping and item.type == 'text' -%}{{- item.text }}{%- elif item is string -%}{{- item }}{%- endif -%}{%- endfor -%}
    {%- else -%}{{- content }}{%- endif -%}
{%- endmacro -%}
{%- for tool in tools or [] %}{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible_text(m.content) }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking and not visible_text(m.content).endswith("/nothink")) else '' -}}
{%- elif m.role == 'assistant' -%}<|assistant|>
{%- if m.tool_calls %}{% for tc in m.tool_calls %}{% set args = tc.function.arguments %}{% for k, v in args.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}{% endfor %}{% else %}
{{ visible_text(m.content).strip() }}{% endif %}
{%- elif m.role == 'system' -%}<|system|>
{{ visible_text(m.content) }}
{%- endif -%}
{%- endfor -%}
{{ '<|assistant|>' if add_generation_prompt }}""",
    # Gemma: the system's text in the first question, roles that alternate
    "gemma": """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}{%- set loop_messages = messages[1:] -%}{%- else -%}{%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception("Conversation roles must alternate") }}{%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}{%- for item in message['content'] -%}{%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}
    {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<start_of_turn>model\\n'}}{%- endif -%}""",
    # Granite 3: documents, a date, a template that sets what it is given
    "granite": """{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set system_message = "Knowledge Cutoff Date: April 2024." %}
{%- if tools and documents %}{%- set system_message = system_message + " tools, documents" %}{%- elif documents %}{%- set system_message = system_message + " documents" %}{%- endif %}
{%- set loop_messages = messages %}{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\\n' }}
{%- if documents %}
    {{- '<|start_of_role|>documents<|end_of_role|>' }}
    {%- for document in documents %}{{- 'Document ' + loop.index | string + '\\n' }}{{- document['text'] }}{%- if not loop.last %}{{- '\\n\\n'}}{%- endif%}{%- endfor %}
{%- endif %}
{%- for message in loop_messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}
    {%- if loop.last and add_generation_prompt %}{{- '<|start_of_role|>assistant' }}{%- if controls %}{{- ' ' + controls | tojson()}}{%- endif %}{{- '<|end_of_role|>' }}{%- endif %}
{%- endfor %}""",
    # SmolLM3 and fine-tunes of TRL: the generation tag
    "generation": """{%- for message in messages -%}
    {%- if message.role == "assistant" -%}{%- generation -%}{{ "<|im_start|>assistant\n" + message.content + "<|im_end|>\n" }}{%- endgeneration -%}
    {%- else -%}{{ "<|im_start|>" ~ message.role ~ "\n" ~ message.content ~ "<|im_end|>\n" }}{%- endif -%}
{%- endfor -%}""",
    # Hermes: Python's types of JSON's, by a macro that calls itself
    "hermes": """{%- macro to_python(spec) %}
{%- set basic = {"string": "str", "number": "float", "integer": "int", "boolean": "bool"} %}
{%- if basic[spec.type] is defined %}{{- basic[spec.type] }}
{%- elif spec.type == "array" %}{{- "list[" + to_python(spec['items']) + "]" }}
{%- elif spec.type == "object" %}{%- if spec.additionalProperties is defined %}{{- "dict[str, " + to_python(spec.additionalProperties) + ']' }}{%- else %}{{- "dict" }}{%- endif %}
{%- elif spec.type is iterable %}{{- "Union[" }}{%- for t in spec.type %}{{- to_python({"type": t}) }}{%- if not loop.last %}{{- "," }}{%- endif %}{%- endfor %}{{- "]" }}
{%- else %}{{- "Any" }}{%- endif %}
{%- endmacro %}
{%- for tool in tools or [] %}
    {{- tool.function.name + "(" }}
    {%- for name, fields in tool.function.parameters.properties|items %}{{- name + ": " + to_python(fields) }}{%- if not loop.last %}{{- ", " }}{%- endif %}{%- endfor %}{{- ")\\n" }}
{%- endfor %}
"""
    + _CHATML,
    # Phi 3: an end of the whole instead of the next turn; Zephyr: the last message only
    "phi-3": "{% for m in messages %}{{'<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    # Command R: documents as texts with numbers
    "command-r": """{{ bos_token }}{% for d in documents or [] %}
Document: {{ loop.index0 }}
{% for key, value in d.items() %}{{ key | title }}: {{ value }}
{% endfor %}{% endfor %}{% for m in messages %}{% if m.role == 'user' %}<|USER_TOKEN|>{{ m.content.strip() }}{% elif m.role == 'assistant' %}<|CHATBOT_TOKEN|><|START_RESPONSE|>{{ m.content.strip() }}<|END_RESPONSE|>{% else %}<|SYSTEM_TOKEN|>{{ m.content }}{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}""",
    # LLaMA 2 as many files have it: one line, a system's text within the first question
    "llama-2": "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
}  # fmt: skip
