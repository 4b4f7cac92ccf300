"""Grammars of what a stranger may write: chat templates, tokenizers, JSON, generation settings."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from hypothesis import strategies as st

# ---- chat templates ----

_ATOMS = st.sampled_from(
    [
        "messages", "messages[0]", "messages[0].content", "bos_token", "ns", "ns.x", "m", "loop",
        "loop.index", "1", "-1", "0", "10**9", "2**62", "1e308", "'a'", "'\\n'", "'%d'", "''", "[]",
        "{}", "none", "true", "namespace()", "range(999)", "undefined_name", "'a' * 9999",
        "[1] * 9999", "raise_exception", "strftime_now", "self", "super", "'%9999999d'",
    ]
)  # fmt: skip
_FILTERS = st.sampled_from(
    [
        "tojson", "tojson(indent=10**6)", "trim", "upper", "length", "list", "string", "join",
        "join('b' * 9999)", "replace('a', 'b' * 9999)", "indent(9999)", "format(3)", "first",
        "last",
        "sort", "unique", "items", "dictsort", "reverse", "batch(2)", "slice(3)", "map('upper')",
        "select", "groupby('role')", "default(messages)", "int", "float", "abs", "round(9)", "bool",
        "safe", "escape", "urlencode", "title", "lines", "pprint", "sum", "min", "no_such_filter",
    ]
)  # fmt: skip
_OPERATORS = st.sampled_from(
    ["+", "-", "*", "/", "//", "%", "**", "~", "and", "or", "in", "not in", "==", "<", "is"]
)


def _deeper(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("({} {} {})".format, inner, _OPERATORS, inner),
        st.builds("({} | {})".format, inner, _FILTERS),
        st.builds("{}[{}]".format, inner, inner),
        st.builds("{}({})".format, inner, inner),
        st.builds("[{}, {}]".format, inner, inner),
        st.builds("{{'k': {}}}".format, inner),
        st.builds("({} if {} else {})".format, inner, inner, inner),
        st.builds("{}.split({})".format, inner, inner),
        st.builds("{}.replace('a', {})".format, inner, inner),
        st.builds(lambda text, n: "not " * n + text, inner, st.sampled_from([1, 9, 999, 19_999])),
        st.builds(lambda text, n: "(" * n + text + ")" * n, inner, st.sampled_from([1, 9, 999])),
        st.builds(lambda text, n: " + ".join([text] * n), inner, st.sampled_from([2, 99])),
    )


EXPRESSIONS = st.recursive(_ATOMS, _deeper, max_leaves=8)


def _statements(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(inner, max_size=4).map("".join),
        st.builds("{{% if {} %}}{}{{% endif %}}".format, EXPRESSIONS, inner),
        st.builds("{{% for m in {} %}}{}{{% endfor %}}".format, EXPRESSIONS, inner),
        st.builds("{{% for i in range(99) %}}{}{{% endfor %}}".format, inner),
        st.builds("{{% macro f(x) %}}{}{{{{ f(x) }}}}{{% endmacro %}}{{{{ f(1) }}}}".format, inner),
        st.builds("{{% set ns.x = {} %}}{}".format, EXPRESSIONS, inner),
        st.builds("{{% set x %}}{}{{% endset %}}{{{{ x }}}}".format, inner),
        st.builds("{{% filter indent(999) %}}{}{{% endfilter %}}".format, inner),
        st.builds("{{% generation %}}{}{{% endgeneration %}}".format, inner),
    )


_LEAVES = st.one_of(
    st.builds("{{{{ {} }}}}".format, EXPRESSIONS),
    st.builds("{{% set ns.x = ns.x ~ {} %}}".format, EXPRESSIONS),
    st.sampled_from(
        ["{% set ns.x = ns.x ~ ns.x %}", "{% set ns.a = ns %}", "{% break %}", "{% include 'a' %}"]
    ),
    st.text(max_size=20),
)
TEMPLATES = st.recursive(_LEAVES, _statements, max_leaves=12).map(
    lambda body: "{% set ns = namespace(x='ab') %}" + body
)
