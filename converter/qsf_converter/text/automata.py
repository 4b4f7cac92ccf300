"""Makes trees of regular expressions tables that find matches with one step for a character.

A state of the table is the list of places in the expression where a match may be, in the order in
which a backtracking matcher would try them; what comes behind a match in that list is dropped.
docs/format.md, section 9, has the form of the tables.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from qsf_converter.text import expressions
from qsf_converter.text.characters import EDGE, Chars

MATCH: Final = 0x8000  # of an entry: a match ends in front of this character
BACKWARD_BITS: Final = 12  # of an entry of the table from the end: the state; above, what matches
_MOST_STATES: Final = 1 << BACKWARD_BITS
_MOST_PLACES: Final = 20_000
_MOST_ENTRIES: Final = 1 << 20
_MOST_AHEAD: Final = 3  # look-aheads over several characters, each of which doubles the columns
_MOST_CLASSES: Final = 255

U16 = NDArray[np.uint16]
_State = TypeVar("_State")


@dataclass(frozen=True)
class Automaton:
    forward: U16  # [states, classes << aheads]
    backward: U16  # [states, classes]; nothing without look-aheads over several characters
    n_aheads: int
    looks_behind: bool


class _Place(NamedTuple):
    """A place in an expression; bits of masks are classes of characters."""

    kind: int
    after: int = 0  # of the character that it takes, or that a look wants there
    before: int = 0
    ahead: int = -1  # of a look: which look-ahead over several characters must match
    is_wanted: bool = True  # or must not
    to: tuple[int, ...] = ()


_END, _ONE, _CHOICE, _LOOK = range(4)


class _Places(list[_Place]):
    def put(self, place: _Place) -> int:
        if len(self) >= _MOST_PLACES:
            raise expressions.ExpressionError(f"an expression of more than {_MOST_PLACES} places")
        self.append(place)
        return len(self) - 1


def sets_of(node: expressions.Node) -> Iterable[Chars]:
    if isinstance(node, expressions.One):
        yield node.chars
    elif isinstance(node, expressions.Look):
        yield from (chars for chars in (node.before, node.after) if chars is not None)
    elif isinstance(node, (expressions.Chain, expressions.Choice)):
        for part in node.parts:
            yield from sets_of(part)
    else:
        yield from sets_of(node.body)


def classes_of(sets: Iterable[Chars]) -> NDArray[np.uint8]:
    packed = {chars.tobytes() for chars in sets}
    edge = np.arange(EDGE + 1) == EDGE
    rows = [edge, *(np.frombuffer(data, np.bool_) for data in sorted(packed))]
    is_cut = np.zeros(EDGE + 1, np.bool_)
    is_cut[0] = True
    for row in rows:
        is_cut[1:] |= row[1:] != row[:-1]
    begins = np.flatnonzero(is_cut)
    columns = np.packbits(np.array([row[begins] for row in rows]), axis=0).T
    _, firsts, ids = np.unique(columns, axis=0, return_index=True, return_inverse=True)
    if len(firsts) > _MOST_CLASSES:
        raise expressions.ExpressionError(f"expressions with {len(firsts)} classes of characters")
    order = np.argsort(np.argsort(firsts)).astype(np.uint8)  # as they come, so the edge is last
    lengths = np.diff([*begins, EDGE + 1])
    return np.repeat(order[ids.reshape(-1)], lengths)


def compile_tree(tree: expressions.Node, classes: NDArray[np.uint8]) -> Automaton:
    """Return the tables of ``tree`` for these classes, which divide none of its sets.

    Raises ExpressionError if they are too large.
    """
    return _Compiler(classes).compile(tree)


def replaced(tree: expressions.Node, content: str, text: str) -> str:
    """Return a short text with the matches of ``tree`` replaced, as the engine finds them."""
    classes = classes_of(sets_of(tree))
    automaton = compile_tree(tree, classes)
    edge = int(classes[EDGE])
    if automaton.n_aheads:
        raise expressions.ExpressionError("a look-ahead over several characters of a normalizer")
    chars = [int(classes[ord(char)]) for char in text]
    parts, done, at = [], 0, 0
    last_end = -1
    while at <= len(text):
        is_behind = automaton.looks_behind and at > 0
        state, end = int(automaton.forward[0, chars[at - 1] if is_behind else edge]), -1
        for place, char in enumerate([*chars[at:], edge], at):
            entry = int(automaton.forward[state, char])
            end = place if entry & MATCH else end
            state = entry & ~MATCH
            if not state:
                break
        if end < 0 or end == at == last_end:
            at += 1
            continue
        parts += [text[done:at], content]
        done = at = last_end = end
    return "".join([*parts, text[done:]])


class _Numbers(Generic[_State]):
    def __init__(self, n_columns: int, *, first: int) -> None:
        self.states: list[_State] = []
        self._most = min(_MOST_STATES - first, _MOST_ENTRIES // n_columns)
        self._first = first
        self._ids: dict[_State, int] = {}

    def of(self, state: _State) -> int:
        if state not in self._ids:
            if len(self.states) >= self._most:
                raise expressions.ExpressionError(f"an expression of more than {self._most} states")
            self._ids[state] = len(self.states) + self._first
            self.states.append(state)
        return self._ids[state]


class _Compiler:
    def __init__(self, classes: NDArray[np.uint8]) -> None:
        self.n_classes = int(classes[EDGE]) + 1
        self.firsts = [int(np.argmax(classes == c)) for c in range(self.n_classes)]
        self.all = (1 << self.n_classes) - 1
        self.aheads: list[expressions.Node] = []  # what those over several characters want
        self.befores: list[int] = []  # masks of sets that look-behinds want

    def mask(self, chars: Chars | None) -> int:
        if chars is None:
            return self.all
        bits = np.packbits(chars[self.firsts], bitorder="little")
        return int.from_bytes(bits.tobytes(), "little")

    def compile(self, tree: expressions.Node) -> Automaton:
        places = _Places()
        start = self.place(places, tree, places.put(_Place(_END)), is_back=False)
        n_aheads = len(self.aheads)
        if n_aheads > _MOST_AHEAD:
            raise expressions.ExpressionError(f"{n_aheads} look-aheads over several characters")
        backward = self.backward() if n_aheads else np.zeros((0, self.n_classes), np.uint16)
        return Automaton(self.forward(places, start), backward, n_aheads, bool(self.befores))

    def place(self, places: _Places, node: expressions.Node, then: int, *, is_back: bool) -> int:
        """Add the places of a tree, of which the last leads to ``then``; return the first."""
        if isinstance(node, expressions.One):
            return places.put(_Place(_ONE, self.mask(node.chars), to=(then,)))
        if isinstance(node, expressions.Look):
            before = self.mask(node.before)
            if before != self.all and before not in self.befores and not is_back:
                self.befores.append(before)
            return places.put(_Place(_LOOK, self.mask(node.after), before, to=(then,)))
        if isinstance(node, expressions.Ahead):
            if is_back:
                raise expressions.ExpressionError("a look-ahead over several characters in another")
            self.aheads.append(node.body)
            idx = len(self.aheads) - 1
            return places.put(_Place(_LOOK, self.all, self.all, idx, node.is_wanted, (then,)))
        if isinstance(node, expressions.Chain):
            for part in node.parts if is_back else reversed(node.parts):
                then = self.place(places, part, then, is_back=is_back)
            return then
        if isinstance(node, expressions.Choice):
            firsts = [self.place(places, part, then, is_back=is_back) for part in node.parts]
            return places.put(_Place(_CHOICE, to=tuple(firsts)))
        return self.place_repeat(places, node, then, is_back=is_back)

    def place_repeat(
        self, places: _Places, node: expressions.Repeat, end: int, *, is_back: bool
    ) -> int:
        def either(more: int) -> _Place:
            return _Place(_CHOICE, to=(end, more) if node.is_lazy else (more, end))

        then = end
        if node.high is None:
            then = places.put(_Place(_CHOICE))
            places[then] = either(self.place(places, node.body, then, is_back=is_back))
        else:
            for _ in range(node.high - node.low):
                then = places.put(either(self.place(places, node.body, then, is_back=is_back)))
        for _ in range(node.low):
            then = self.place(places, node.body, then, is_back=is_back)
        return then

    # ---- from the beginning to the end: states are what look-behinds see, and places ----

    def forward(self, places: _Places, start: int) -> U16:
        n_columns = self.n_classes << len(self.aheads)
        edge = self.n_classes - 1
        numbers = _Numbers[tuple[tuple[bool, ...], tuple[int, ...]]](n_columns, first=1)
        starts = [numbers.of((self.behind(char), (start,))) for char in range(self.n_classes)]
        rows = [starts + [0] * (n_columns - self.n_classes)]
        for behind, kernel in numbers.states:
            row = []
            for column in range(n_columns):
                ahead, char = divmod(column, self.n_classes)
                ends, nexts = self.step(places, behind, kernel, char, ahead)
                has_next = nexts and char != edge
                row.append(
                    MATCH * ends | (numbers.of((self.behind(char), nexts)) if has_next else 0)
                )
            rows.append(row)
        return np.array(rows, "<u2")

    def behind(self, char: int) -> tuple[bool, ...]:
        """Return which look-behinds want a character of this class."""
        return tuple(bool(mask >> char & 1) for mask in self.befores)

    def step(
        self,
        places: _Places,
        behind: tuple[bool, ...],
        kernel: Sequence[int],
        char: int,
        ahead: int,
    ) -> tuple[bool, tuple[int, ...]]:
        """Return whether a match ends in front of a character, and the places behind it."""
        seen: set[int] = set()
        nexts: dict[int, None] = {}
        todo = list(reversed(kernel))
        while todo:
            at = todo.pop()
            if at in seen:
                continue
            seen.add(at)
            place = places[at]
            if place.kind == _END:
                return True, tuple(nexts)
            if place.kind == _CHOICE:
                todo.extend(reversed(place.to))
            elif not place.after >> char & 1:
                continue
            elif place.kind == _ONE:
                nexts[place.to[0]] = None
            elif (place.ahead < 0 or bool(ahead >> place.ahead & 1) == place.is_wanted) and (
                place.before == self.all or behind[self.befores.index(place.before)]
            ):
                todo.append(place.to[0])
        return False, tuple(nexts)

    # ---- from the end to the beginning: which look-aheads match what follows ----

    def backward(self) -> U16:
        """States are places, each with a mask for the character in front of it."""
        places = _Places()
        ends = [places.put(_Place(_END)) for _ in self.aheads]
        starts = [
            self.place(places, body, end, is_back=True)
            for body, end in zip(self.aheads, ends, strict=True)
        ]
        edge = self.n_classes - 1
        numbers = _Numbers[frozenset[tuple[int, int]]](self.n_classes, first=0)
        numbers.of(self.closed(places, starts, edge))
        rows = []
        for state in numbers.states:
            row = []
            for char in range(self.n_classes):
                here = [at for at, mask in state if mask >> char & 1]
                bits = sum(1 << k for k, end in enumerate(ends) if end in here)
                nexts = [places[at].to[0] for at in here if at not in ends]
                after = (
                    0 if char == edge else numbers.of(self.closed(places, [*nexts, *starts], char))
                )
                row.append(bits << BACKWARD_BITS | after)
            rows.append(row)
        return np.array(rows, "<u2")

    def closed(
        self, places: _Places, kernel: Iterable[int], after: int
    ) -> frozenset[tuple[int, int]]:
        """Return the characters and ends that are reached without a character."""
        seen: set[tuple[int, int]] = set()
        todo = [(at, self.all) for at in kernel]
        while todo:
            item = todo.pop()
            if item in seen:
                continue
            seen.add(item)
            place, mask = places[item[0]], item[1]
            if place.kind == _CHOICE:
                todo.extend((at, mask) for at in place.to)
            elif place.kind == _LOOK and place.after >> after & 1 and mask & place.before:
                todo.append((place.to[0], mask & place.before))
        kinds = ((at, places[at], mask) for at, mask in seen)
        return frozenset(
            (at, mask & place.after if place.kind == _ONE else mask)
            for at, place, mask in kinds
            if place.kind in (_ONE, _END)
        )
