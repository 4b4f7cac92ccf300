"""Token ids as arguments."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import itertools
from array import array

from hypothesis import given
from hypothesis import strategies as st

from qsf.text.arguments import count_common

TOKENS = st.lists(st.integers(0, 2), max_size=200)


@given(common=TOKENS, a=TOKENS, b=TOKENS)
def test_common_tokens_are_counted(common: list[int], a: list[int], b: list[int]) -> None:
    a, b = common + a, common + b
    equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    assert count_common(array("I", a), array("I", b)) == len(list(equal))
