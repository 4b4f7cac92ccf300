"""Snippets of Jinja, and abridged templates with the features of published ones, for a comparison
with transformers' engine.

The templates are written for these tests, after the model cards of the families that their comments
name; only the features count, so most texts are left out.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import Any

VALUES: dict[str, Any] = {
    "n": 7, "big": 2**70, "minus": -7, "zero": 0, "x": 2.5, "tiny": 1e-07, "huge": 1e20, "neg": -0.0,
    "third": 1 / 3, "s": "Hello, World", "t": "  two\twords \n", "u": "Straße ﬁn É \U0001f600", "e": "",
    "yes": True, "no": False, "nothing": None, "items": [3, 1, 2], "names": ["b", "a", "C"],
    "d": {"b": 1, "a": [1.0, None, True], "keys": "k", "é": "<&'\">"},
    "rows": [{"k": "x", "v": 1}, {"k": "y", "v": 2}, {"k": "x", "v": 3}],
    "nested": [1, [2, [3, []]]], "messages": [{"role": "user", "content": "Hi"}],
}  # fmt: skip

_NUMBERS = ("n", "big", "minus", "zero", "x", "tiny", "huge", "neg", "third", "yes")
_NUMBER_USES = (
    *("{}", "{} | string", "{} | tojson", "{} | round(1)", "{} | int", "{} | float", "{} * 2"),
    *("{} // 2", "{} % 3", "-{}", "{} ~ 'x'", "'%s|%r' % ({}, {})", "'%.2f' % {}"),
    *("'{{}}'.format({})", "{} is number", "{} == 7", "{} | abs"),
)
_TEXT_USES = (
    *("upper()", "lower()", "title()", "capitalize()", "swapcase()", "casefold()", "strip()"),
    *("lstrip()", "rstrip()", "strip('Hd')", "split()", "split(',')", "split(',', 1)"),
    *("rsplit('o', 1)", "splitlines()", "partition(',')", "rpartition('o')", "find('o')"),
    *("rfind('o')", "index('l') if 'l' in {0} else 0", "count('l')", "replace('l', 'L', 1)"),
    *("startswith('He')", "startswith(('x', ' '))", "endswith('\\n')", "removeprefix('He')"),
    *("removesuffix('d')", "isdigit()", "isalpha()", "isspace()", "isupper()", "islower()"),
    *("zfill(20)", "center(20, '*')", "ljust(20, '.')", "rjust(20)", "expandtabs(4)"),
    *("encode('utf-8')", "join(['a', 'b'])", "isidentifier()", "istitle()", "isnumeric()"),
)
_TEXT_FILTERS = (
    *(
        "upper",
        "lower",
        "title",
        "capitalize",
        "trim",
        "trim('dH')",
        "length",
        "count",
        "wordcount",
    ),
    *(
        "reverse",
        "first",
        "last",
        "list",
        "tojson",
        "tojson(ensure_ascii=True)",
        "string",
        "escape",
    ),
    *("e", "safe", "forceescape", "urlencode", "truncate(9)", "truncate(5, true)", "center(20)"),
    *("truncate(5, false, '..', 0)", "wordwrap(5)", "indent(2)", "indent(2, true)", "striptags"),
    *(
        "replace('o', '0')",
        "default('x')",
        "d('x', true)",
        "int",
        "int(3)",
        "float",
        "upper | lower",
    ),
    *("indent('> ')", "batch(3) | list", "slice(2) | list", "pprint", "format"),
)
_EXPRESSIONS = (
    # Slices, operators, tests
    "s[0]", "s[-1]", "s[1:4]", "s[::-1]", "s[:-2]", "s[::2]", "items[1:]", "items[-2:]", "items[:-1]",
    "messages[0]['role']", "messages[0].content", "messages[0]['no']", "d.keys() | list", "d['keys']", "d.é",
    "d.items() | list", "d.get('z', 'none')", "d.get('a')", "d.values() | list", "d | length", "d",
    "d | tojson", "d | tojson(indent=2)", "d | tojson(indent=4, ensure_ascii=True)", "nested",
    "d | tojson(separators=(',', ':'))", "d | tojson(sort_keys=true)", "d | dictsort", "d | items | list",
    "dict(a=1, b=2)", "dict([('a', 1)])", "{'a': 1, 'b': {'c': [1, 2]}}", "{1: 2}[1]", "(1, 2, 3)",
    "(1,)", "[1, 'a', none, true, 1.0]", "[1, 2] + [3]", "[0] * 3", "'ab' * 3", "1 + 2 * 3 - 4 / 2",
    "7 // 2", "-7 // 2", "7 % -3", "2 ** 10", "2 ** -1", "2 ** 3 ** 2", "1 / 3", "10 / 2", "1e3", "1_000",
    "0x1f", "0b101", "1.5e-7", "12345678901234567890123", "'a' ~ 1 ~ none ~ 1.0 ~ true", "'a' 'b'",
    "1 < 2 < 3", "3 in items", "4 not in items", "'ell' in s", "'b' in d", "not yes", "yes and no or n",
    "nothing or 'x'", "e or 'empty'", "'a' < 'b'", "items == [3, 1, 2]", "1 == 1.0", "1 == true",
    "none == false", "'1' == 1", "x if yes else 'no'", "x if no", "(x if no) is undefined",
    "nothing is none", "nothing is not none", "missing is defined", "n is defined", "s is string",
    "n is integer", "x is float", "yes is boolean", "no is false", "yes is true", "items is iterable",
    "nothing is iterable", "s is iterable", "d is mapping", "items is mapping", "items is sequence",
    "s is sequence", "n is sequence", "n is odd", "n is even", "n is divisibleby 7", "n is divisibleby(2)",
    "2 is in items", "n is eq 7", "n is gt(6)", "n is lt 3", "n is ne 8", "n is ge 7", "n is le 7",
    "s is lower", "s is upper", "n is sameas n", "n is callable", "range is callable", "s is escaped",
    "'upper' is filter", "'none' is test", "missing", "missing | default('x')", "missing | length",
    "nothing | default('x')", "nothing | default('x', true)", "nothing", "yes",
    "nothing | tojson", "yes | tojson", "yes | string", "yes | int", "nothing | string", "none", "None",
    # Filters of lists
    "items | sort", "items | sort(reverse=true)", "names | sort", "names | sort(case_sensitive=true)",
    "items | join('-')", "names | join", "rows | join(',', attribute='k')", "items | first", "items | last",
    "items | max", "items | min", "items | sum", "rows | sum(attribute='v')", "items | reverse | list",
    "items | unique | list", "names | map('upper') | list", "rows | map(attribute='k') | list",
    "rows | map(attribute='z', default='-') | list", "rows | selectattr('k', 'equalto', 'x') | list",
    "rows | selectattr('k', '==', 'x') | map(attribute='v') | sum", "rows | rejectattr('v', 'gt', 1) | list",
    "items | select('odd') | list", "items | reject('odd') | list", "rows | groupby('k') | list",
    "rows | sort(attribute='v', reverse=true) | first", "items | batch(2, 0) | list", "items | random is number",
    "items | slice(2) | list", "items | length", "items | list", "items | tojson", "items | string",
    "nested | tojson", "nested | string", "range(5) | list", "range(1, 10, 3) | list", "range(3, 0, -1) | list",
    "items.index(2)", "items.count(1)", "items | map('string') | join", "names | map('replace', 'a', 'z') | list",
    "items | map('float') | list", "d | xmlattr", "s | upper | replace('L', 'l') | length", "42.7 | round | int",
    "2.5 | round", "3.5 | round", "2.675 | round(2)", "42.55 | round(1, 'floor')", "42.51 | round(1, 'ceil')",
    "1234567.891 | round(-2)", "7 | round(2)", "'3.7' | float", "'x' | float(1.5)", "'0x1f' | int(0, 16)",
    "'%05d|%x|%e|%g|%5s|%-5s|%%' % (42, 255, 1.5, 1e-7, 'a', 'b')", "'%(a)s' % {'a': 1}", "'%s' | format(n)",
    "'{0} {1} {0}'.format('a', 'b')", "'{:>5}|{:<5}|{:^5}|{:05d}|{:.3f}|{:,}'.format(1, 2, 3, 4, 5.0, 10**6)",
    "'{a[b]} {c.real}'.format(a={'b': 1}, c=3)", "u", "u | length", "u[::-1]", "u | tojson", "u | upper",
    "u | tojson(ensure_ascii=true)", "'\\u00e9\\n\\t\\\\\\''", '"it\'s"', "'<b>' | tojson", "'</script>' | tojson",
    "t.split() | join('|')", "s | urlize", "'a\nb' | indent", "''.join(names)", "', '.join(names | sort)",
    "n | filesizeformat", "10000000 | filesizeformat(true)", "cycler('a', 'b').next()", "joiner(', ')()", "strftime_now('%Y') | int > 2000", "namespace(a=1).a",
)  # fmt: skip

EXPRESSIONS = (
    *(use.format(*[name] * use.count("{}")) for name in _NUMBERS for use in _NUMBER_USES),
    *(f"{name}.{use.format(name)}" for name in ("s", "t") for use in _TEXT_USES),
    *(f"{name} | {use}" for name in ("s", "t", "u") for use in _TEXT_FILTERS),
    *_EXPRESSIONS,
)

STATEMENTS = (
    # White space and comments
    "a\n{% if yes %}\nb\n{% endif %}\nc\n", "a\r\n{% if yes %}\r\nb\r\n{% endif %}\r\nc\r\n", "a\rb\r{{ n }}\r",
    "  {% if yes %}  x  {% endif %}  \n y", "a {%- if yes -%} b {%- endif -%} c", "a {{- n -}} b", "a {#- c -#} b",
    "a\n  {# c #}\nb", "a {%+ if yes %} b {%+ endif %}", "\t{% set q = 1 %}\n{{ q }}", "x {# {{ n }} #} y\n",
    "{{ n }}\n", "{{ n }}\n\n", "\n\n{{ n }}", "{% raw %}{{ n }} {% if %}{% endraw %}", "{%- raw -%} a {%- endraw -%}",
    "{{ '{{' }}{{ '%}' }}", "a\n\n\n{% if no %}{% endif %}\n\nb", "{%- for i in items %}\n  {{ i }}\n{%- endfor %}\n",
    # Branches and loops
    "{% if no %}a{% elif n > 5 %}b{% else %}c{% endif %}", "{% if nothing %}a{% elif e %}b{% else %}c{% endif %}",
    "{% for i in items %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}",
    "{% for i in items %}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{% endfor %}",
    "{% for i in items %}{{ loop.previtem | default('-') }}<{{ loop.nextitem | default('-') }}{% endfor %}",
    "{% for i in items %}{{ loop.cycle('a', 'b') }}{{ loop.changed(i > 1) }}{{ loop.depth }}{% endfor %}",
    "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}", "{% for k in d %}{{ k }}{% endfor %}",
    "{% for k, v in d | dictsort %}{{ k }}{% endfor %}", "{% for i in [] %}a{% else %}none{% endfor %}",
    "{% for i in items if i > 1 %}{{ i }}{{ loop.index }}{% endfor %}", "{% for c in s %}{{ c }}.{% endfor %}",
    "{% for i in items %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
    "{% for i in items %}{% if i == 1 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{% for a, b in [(1, 2), (3, 4)] %}{{ a + b }}{% endfor %}", "{% for i in range(3) %}{% for j in range(i) %}{{ i }}{{ j }} {% endfor %}{% endfor %}",
    "{% for i in nested recursive %}{% if i is iterable %}[{{ loop(i) }}]{% else %}{{ i }}{% endif %}{% endfor %}",
    "{% for m in messages[::-1] %}{{ m.role }}{% endfor %}", "{% for i in missing %}a{% endfor %}",
    "{% for row in rows | groupby('k') %}{{ row.grouper }}{{ row.list | length }}{% endfor %}",
    # Scopes
    "{% set a = 1 %}{% for i in items %}{% set a = i %}{% endfor %}{{ a }}",
    "{% set ns = namespace(a=1, b=[]) %}{% for i in items %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}",
    "{% set ns = namespace() %}{% set ns.x = n %}{{ ns.x }}{{ ns.y is defined }}", "{% set a, b = 1, 2 %}{{ b }}{{ a }}",
    "{% set a %}x{{ n }}\n{% endset %}[{{ a }}]", "{% set a | upper %}x{% endset %}{{ a }}", "{% with a = 1 %}{{ a }}{% endwith %}{{ a }}",
    "{% if yes %}{% set a = 3 %}{% endif %}{{ a }}", "{% set messages = messages + [{'role': 'x'}] %}{{ messages | length }}",
    "{% set d = dict(d, z=1) %}{{ d.z }}", "{% set l = items + [] %}{{ l | sort }}{{ items }}", "{% set _ = d.get('a') %}{{ _ }}",
    # Macros, calls, filters
    "{% macro f(a, b=2) %}{{ a }}{{ b }}{% endmacro %}{{ f(1) }}{{ f(1, 3) }}{{ f(b=4, a=5) }}",
    "{% macro f(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1, 2, 3) }}{{ f(1, z=2) }}",
    "{% macro f(x) %}{% if x > 0 %}{{ x }}{{ f(x - 1) }}{% endif %}{% endmacro %}{{ f(5) }}",
    "{% macro f() %}<{{ caller() }}>{% endmacro %}{% call f() %}in{{ n }}{% endcall %}",
    "{% macro f() %}{{ caller(1, 2) }}{% endmacro %}{% call(a, b) f() %}{{ a }}{{ b }}{% endcall %}",
    "{% macro f() %}x{% endmacro %}{{ f.name }}{{ f.arguments }}{{ f() | upper }}", "{% macro f(a) %}{{ a is defined }}{% endmacro %}{{ f() }}",
    "{% macro f() -%}\n  x\n{%- endmacro %}[{{ f() }}]", "{% filter upper %}a{{ n }}b{% endfilter %}", "{% filter indent(2) %}a\nb{% endfilter %}",
    "{% block a %}x{{ n }}{% endblock %}{{ self.a() }}", "{% autoescape true %}{{ '<' }}{% endautoescape %}",
    "{{ items | map('string') | map('length') | sum }}",
    # Tags of transformers
    "a{% generation %} b {% endgeneration %}c", "a{%- generation -%} b {%- endgeneration -%} c",
    "{% for i in items %}{% generation %}{{ i }}{{ loop.last }}\n{% endgeneration %}{% endfor %}",
    "{% generation %}{% set q = 1 %}{% endgeneration %}{{ q is defined }}", "{{ strftime_now('%d %b %Y') | length }}",
)  # fmt: skip

# What fails, in transformers too
FAILURES = (
    "{{ nothing + 'a' }}", "{{ missing.a.b }}", "{{ missing + 1 }}", "{{ 'a' + 1 }}", "{{ nothing | length }}", "{{ 1 / 0 }}",
    "{{ items[9].a }}", "{{ items.append(4) }}", "{{ d.update({}) }}", "{{ d.pop('a') }}", "{{ s.nosuch() }}", "{{ items | nosuch }}",
    "{{ n is nosuch }}", "{% nosuch %}", "{% if %}", "{{ }}", "{{ 'a", "{% for i in n %}{% endfor %}", "{% do items %}", "{{ s.__class__.a }}",
    "{% include 'a' %}", "{% import 'a' as b %}", "{% extends 'a' %}", "{{ range(200000) }}", "{{ d | tojson(nosuch=1) }}", "{{ '%d' % 'a' }}",
    "{{ raise_exception('no') }}", "{{ {} | tojson(indent=[]) }}", "{{ namespace | tojson }}", "{{ items.sort() }}", "{{ dict(1) }}", "{{ s.format() }}{{ '{}'.format() }}",
)  # fmt: skip

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
