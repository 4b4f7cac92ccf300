"""Reads regular expressions into trees, and makes tables of these.

The syntax is Oniguruma's, as the `tokenizers` library has it. What a tree cannot say (references,
what repeats an empty match) is refused by name.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from qsf_converter.text import characters
from qsf_converter.text.characters import EDGE, Chars, empty, is_cased_as_one, listed, named, others

_MOST_COPIES: Final = 2000  # of a counted part
_MOST_DEPTH: Final = 50


class ExpressionError(ValueError):
    """An expression that cannot be compiled; the text says which part."""


@dataclass(frozen=True, eq=False)
class One:
    chars: Chars


@dataclass(frozen=True, eq=False)
class Look:
    """Nothing, where the character before and the one after are of these sets; None: any."""

    before: Chars | None = None
    after: Chars | None = None


@dataclass(frozen=True, eq=False)
class Ahead:
    body: Node
    is_wanted: bool


@dataclass(frozen=True, eq=False)
class Chain:
    parts: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Choice:
    parts: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Repeat:
    body: Node
    low: int
    high: int | None
    is_lazy: bool = False


Node: TypeAlias = One | Look | Ahead | Chain | Choice | Repeat

_NEWLINE: Final = (10, 10)
_ESCAPED: Final = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "a": 7, "e": 27}
_CLASSES: Final = {"d": "nd", "s": "space", "w": "word", "h": "xdigit"}
_COUNT: Final = re.compile(r"\{(\d{0,6})(,?)(\d{0,6})\}")
_HEX: Final = re.compile(r"x\{([0-9A-Fa-f]{1,8})\}|x([0-9A-Fa-f]{1,2})|u([0-9A-Fa-f]{4})")
_OPTIONS: Final = re.compile(r"\?([imx]*)(?:-([imx]*))?([:)])")
_NAMED_SET: Final = re.compile(r"\{(\^?)([^}]*)\}")
_POSIX: Final = re.compile(r"\[:(\^?)(\w+):\]")


def at_edge(chars: Chars) -> Chars:
    wider: Chars = chars.copy()
    wider[EDGE] = True
    return wider


def is_empty(node: Node) -> bool:
    if isinstance(node, Chain):
        return all(map(is_empty, node.parts))
    if isinstance(node, Choice):
        return any(map(is_empty, node.parts))
    if isinstance(node, Repeat):
        return node.low == 0 or is_empty(node.body)
    return not isinstance(node, One)


def parse(expression: str) -> Node:
    parser = _Parser(expression)
    node = parser.choice()
    if parser.at != len(expression):
        raise parser.error("a closing bracket without an opening one")
    return node


def literal(text: str) -> Node:
    return Chain(tuple(One(listed([(ord(char), ord(char))])) for char in text))


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0
        self.options: frozenset[str] = frozenset()

    def error(self, what: str) -> ExpressionError:
        return ExpressionError(f"{what} at character {self.at} of {self.text[:120]!r}")

    def take(self, text: str) -> bool:
        """Whether ``text`` comes next; if so it is behind."""
        is_next = self.text.startswith(text, self.at)
        self.at += len(text) * is_next
        return is_next

    def take_match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self.text, self.at)
        self.at = match.end() if match else self.at
        return match

    def next_char(self) -> str:
        if self.at == len(self.text):
            raise self.error("an unfinished part")
        self.at += 1
        return self.text[self.at - 1]

    # ---- trees ----

    def choice(self) -> Node:
        self.depth += 1
        if self.depth > _MOST_DEPTH:
            raise self.error(f"more than {_MOST_DEPTH} nested groups")
        parts = [self.chain()]
        while self.take("|"):
            parts.append(self.chain())
        self.depth -= 1
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def chain(self) -> Node:
        parts: list[Node] = []
        run = ""  # of characters that stand for themselves
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            begin = self.at
            part = self.repeated(self.atom())
            text = self.text[begin : self.at]
            run = run + text if len(text) == 1 else ""
            if "i" in self.options and is_cased_as_one(run):
                raise self.error("letters that equal a single character but for case")
            parts.append(part)
        return parts[0] if len(parts) == 1 else Chain(tuple(parts))

    def repeated(self, node: Node) -> Node:
        while self.at < len(self.text):
            begin = self.at
            char = self.next_char()
            if char in "?*+":
                low, high = (char == "+"), (1 if char == "?" else None)
                if self.take("+"):
                    node = self.greedy_for_good(self.checked(Repeat(node, int(low), high)))
                else:
                    node = self.checked(Repeat(node, int(low), high, self.take("?")))
                continue
            self.at = begin
            count = self.take_match(_COUNT)
            if not count or not (count[1] or count[3]):
                self.at = begin
                return node
            least = int(count[1] or 0)
            most = (int(count[3]) if count[3] else None) if count[2] else least
            if most is not None and most < least:
                raise self.error("a number of times that descends")
            if max(least, most or 0) > _MOST_COPIES:
                raise self.error(f"a part more than {_MOST_COPIES} times")
            is_fixed = not count[2]
            node = self.checked(Repeat(node, least, most, not is_fixed and self.take("?")))
            if is_fixed and self.take("?"):
                node = Repeat(node, 0, 1)
        return node

    def checked(self, node: Repeat) -> Repeat:
        if node.high not in (0, 1) and is_empty(node.body):
            raise self.error("a repetition of what may be empty")
        return node

    def greedy_for_good(self, node: Node) -> Node:
        """Return the tree of an atomic group: what it took it does not give back."""
        if isinstance(node, (One, Look, Ahead)):
            return node
        if isinstance(node, (Chain, Choice)) and all(isinstance(p, One) for p in node.parts):
            return node
        if isinstance(node, Repeat) and isinstance(node.body, One) and not node.is_lazy:
            end = Look(after=at_edge(others(node.body.chars)))
            if node.high is None:
                return Chain((node, end))
            counts = range(node.high - 1, node.low - 1, -1)
            fewer = (Chain((Repeat(node.body, n, n), end)) for n in counts)
            return Choice((Repeat(node.body, node.high, node.high), *fewer))
        raise self.error("an atomic group, or ++, of more than a set of characters")

    def atom(self) -> Node:
        char = self.next_char()
        if char == "(":
            return self.group()
        if char == "[":
            return One(self.char_class())
        if char == ".":
            return One(others(empty() if "m" in self.options else listed([_NEWLINE])))
        if char == "^":
            at_line = Look(before=listed([_NEWLINE]), after=others(empty()))
            return Choice((Look(before=at_edge(empty())), at_line))
        if char == "$":
            return Look(after=at_edge(listed([_NEWLINE])))
        if char == "\\":
            return self.escape()
        if char in "?*+":
            raise self.error("a repetition of nothing")
        return One(self.char(ord(char)))

    def char(self, point: int) -> Chars:
        if point >= EDGE:
            raise self.error("a character that does not exist")
        if "i" not in self.options:
            return listed([(point, point)])
        if is_cased_as_one(chr(point)):
            raise self.error("a letter that equals several but for case")
        return characters.without_case(listed([(point, point)]))

    def group(self) -> Node:
        before = self.options
        options = self.take_match(_OPTIONS)
        if options:
            self.options = self.options | set(options[1]) - set(options[2] or "")
            if "x" in self.options:
                raise self.error("the option x")
            node = self.choice()
            self.options = before
            if options[3] == ")":  # to the end of the group around it
                return node
        elif self.take("?="):
            node = self.ahead(self.choice(), is_wanted=True)
        elif self.take("?!"):
            node = self.ahead(self.choice(), is_wanted=False)
        elif self.take("?<=") or self.take("?<!"):
            is_wanted = self.text[self.at - 1] == "="
            chars = _only_char(self.choice(), is_behind=True)
            if chars is None:
                raise self.error("a look-behind of more than a character")
            node = Look(before=chars if is_wanted else ~chars)
        elif self.take("?>"):
            node = self.greedy_for_good(self.choice())
        elif self.take("?") and not self.take_match(re.compile(r"<[^\W\d]\w*>")):
            raise self.error("a group of an unknown kind")
        else:
            node = self.choice()
        if not self.take(")"):
            raise self.error("a group without an end")
        self.options = before
        return node

    @staticmethod
    def ahead(body: Node, *, is_wanted: bool) -> Node:
        chars = _only_char(body)
        if chars is None:
            return Ahead(body, is_wanted)
        return Look(after=chars if is_wanted else ~chars)

    def escape(self) -> Node:
        char = self.text[self.at : self.at + 1]
        if char in ("A", "z", "b", "B"):
            self.at += 1
            edge, word = at_edge(empty()), named("word")
            if char in "Az":
                return Look(before=edge) if char == "A" else Look(after=edge)
            pairs = (
                [(word, ~word), (~word, word)] if char == "b" else [(word, word), (~word, ~word)]
            )
            return Choice(tuple(Look(*pair) for pair in pairs))
        if char and char in "GZRXKkg123456789":
            raise self.error(f"\\{char}")
        chars = self.escaped_set()
        if chars is not None:
            return One(chars)
        return One(self.char(self.escaped_char()))

    # ---- sets of characters ----

    def escaped_set(self, *, is_inside: bool = False) -> Chars | None:
        """Return the set behind a backslash, if one is there, outside or inside of brackets."""
        char = self.text[self.at : self.at + 1]
        if char and char.lower() in _CLASSES:
            self.at += 1
            chars = self.set_of(_CLASSES[char.lower()], is_inside=is_inside)
            return others(chars) if char.isupper() else chars
        if char and char in "pP" and self.text.startswith("{", self.at + 1):
            self.at += 1
            match = self.take_match(_NAMED_SET)
            chars = self.set_of(match[2] if match else "", is_inside=is_inside)
            is_other = (char == "P") != bool(match and match[1])
            return others(chars) if is_other else chars
        return None

    def escaped_char(self) -> int:
        match = self.take_match(_HEX)
        if match:
            return int(match[1] or match[2] or match[3], 16)
        octal = self.take_match(re.compile("[0-7]{1,3}"))
        if octal:
            return int(octal[0], 8)
        char = self.next_char()
        if char in "cCM":
            raise self.error(f"\\{char}")
        return _ESCAPED.get(char, ord(char))

    def set_of(self, name: str, *, is_inside: bool) -> Chars:
        """Return a set by its name; inside of brackets Oniguruma's words lack six numbers."""
        try:
            chars = named(name)
        except KeyError:
            raise self.error(f"the set of characters {name[:40]!r}") from None
        if is_inside and name.lower() == "word":
            return chars & ~listed([(0xB2, 0xB3), (0xB9, 0xB9), (0xBC, 0xBE)])
        return chars

    def char_class(self) -> Chars:
        """Return the set in brackets, of which the first one is behind."""
        is_other = self.take("^")
        chars: Chars | None = None
        part = empty()
        is_first = True
        while is_first or not self.take("]"):
            if self.take("&&"):
                chars = part if chars is None else chars & part
                part = empty()
            else:
                part |= self.class_item()
            is_first = False
        chars = part if chars is None else chars & part
        if "i" in self.options:
            members = np.flatnonzero(chars[:0x20000])
            if len(members) < 1000 and any(is_cased_as_one(chr(point)) for point in members):
                raise self.error("a letter that equals several but for case")
            chars = characters.without_case(chars)
        return others(chars) if is_other else chars

    def class_item(self) -> Chars:
        posix = self.take_match(_POSIX)
        if posix:
            is_marks = posix[2] == "punct"  # another set than \p{Punct}
            chars = named("p") | named("s") if is_marks else self.set_of(posix[2], is_inside=True)
            return others(chars) if posix[1] else chars
        if self.take("["):
            self.depth += 1
            if self.depth > _MOST_DEPTH:
                raise self.error(f"more than {_MOST_DEPTH} nested groups")
            chars = self.char_class()
            self.depth -= 1
            return chars
        first = self.class_char()
        if not isinstance(first, int):
            return first
        begin = self.at
        if self.take("-") and not self.text.startswith(("]", "[", "&&"), self.at):
            last = self.class_char()
            if isinstance(last, int):
                if last < first:
                    raise self.error("a range that descends")
                return listed([(first, last)])
            raise self.error("a range that ends with a set")
        self.at = begin
        return listed([(first, first)])

    def class_char(self) -> int | Chars:
        char = self.next_char()
        if char != "\\":
            return ord(char)
        chars = self.escaped_set(is_inside=True)
        if chars is not None:
            return chars
        if self.take("b"):
            return 8
        return self.escaped_char()


def _only_char(node: Node, *, is_behind: bool = False) -> Chars | None:
    """Return the set if the tree only looks at one character, or at the edge."""
    if isinstance(node, One):
        return node.chars
    if isinstance(node, Look):
        chars, other = (node.before, node.after) if is_behind else (node.after, node.before)
        return chars if other is None else None
    if isinstance(node, Choice):
        sets = [_only_char(part, is_behind=is_behind) for part in node.parts]
        if all(chars is not None for chars in sets):
            return characters.union([chars for chars in sets if chars is not None])
    return None


# ---- trees become tables that find matches with one step for a character ----

# A state of the table is the list of places in the expression where a match may be, in the order in
# which a backtracking matcher would try them; what comes behind a match in that list is dropped.
# docs/format.md, section 9, has the form of the tables.

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
            raise ExpressionError(f"an expression of more than {_MOST_PLACES} places")
        self.append(place)
        return len(self) - 1


def sets_of(node: Node) -> Iterable[Chars]:
    if isinstance(node, One):
        yield node.chars
    elif isinstance(node, Look):
        yield from (chars for chars in (node.before, node.after) if chars is not None)
    elif isinstance(node, (Chain, Choice)):
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
        raise ExpressionError(f"expressions with {len(firsts)} classes of characters")
    order = np.argsort(np.argsort(firsts)).astype(np.uint8)  # as they come, so the edge is last
    lengths = np.diff([*begins, EDGE + 1])
    return np.repeat(order[ids.reshape(-1)], lengths)


def compile_tree(tree: Node, classes: NDArray[np.uint8]) -> Automaton:
    """Return the tables of ``tree`` for these classes, which divide none of its sets.

    Raises ExpressionError if they are too large.
    """
    return _Compiler(classes).compile(tree)


def replaced(tree: Node, content: str, text: str) -> str:
    """Return a short text with the matches of ``tree`` replaced, as the engine finds them."""
    classes = classes_of(sets_of(tree))
    automaton = compile_tree(tree, classes)
    edge = int(classes[EDGE])
    if automaton.n_aheads:
        raise ExpressionError("a look-ahead over several characters of a normalizer")
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
                raise ExpressionError(f"an expression of more than {self._most} states")
            self._ids[state] = len(self.states) + self._first
            self.states.append(state)
        return self._ids[state]


class _Compiler:
    def __init__(self, classes: NDArray[np.uint8]) -> None:
        self.n_classes = int(classes[EDGE]) + 1
        self.firsts = [int(np.argmax(classes == c)) for c in range(self.n_classes)]
        self.all = (1 << self.n_classes) - 1
        self.aheads: list[Node] = []  # what those over several characters want
        self.befores: list[int] = []  # masks of sets that look-behinds want

    def mask(self, chars: Chars | None) -> int:
        if chars is None:
            return self.all
        bits = np.packbits(chars[self.firsts], bitorder="little")
        return int.from_bytes(bits.tobytes(), "little")

    def compile(self, tree: Node) -> Automaton:
        places = _Places()
        start = self.place(places, tree, places.put(_Place(_END)), is_back=False)
        n_aheads = len(self.aheads)
        if n_aheads > _MOST_AHEAD:
            raise ExpressionError(f"{n_aheads} look-aheads over several characters")
        backward = self.backward() if n_aheads else np.zeros((0, self.n_classes), np.uint16)
        return Automaton(self.forward(places, start), backward, n_aheads, bool(self.befores))

    def place(self, places: _Places, node: Node, then: int, *, is_back: bool) -> int:
        """Add the places of a tree, of which the last leads to ``then``; return the first."""
        if isinstance(node, One):
            return places.put(_Place(_ONE, self.mask(node.chars), to=(then,)))
        if isinstance(node, Look):
            before = self.mask(node.before)
            if before != self.all and before not in self.befores and not is_back:
                self.befores.append(before)
            return places.put(_Place(_LOOK, self.mask(node.after), before, to=(then,)))
        if isinstance(node, Ahead):
            if is_back:
                raise ExpressionError("a look-ahead over several characters in another")
            self.aheads.append(node.body)
            idx = len(self.aheads) - 1
            return places.put(_Place(_LOOK, self.all, self.all, idx, node.is_wanted, (then,)))
        if isinstance(node, Chain):
            for part in node.parts if is_back else reversed(node.parts):
                then = self.place(places, part, then, is_back=is_back)
            return then
        if isinstance(node, Choice):
            firsts = [self.place(places, part, then, is_back=is_back) for part in node.parts]
            return places.put(_Place(_CHOICE, to=tuple(firsts)))
        return self.place_repeat(places, node, then, is_back=is_back)

    def place_repeat(self, places: _Places, node: Repeat, end: int, *, is_back: bool) -> int:
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
