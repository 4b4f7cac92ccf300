"""Reads regular expressions into trees: Oniguruma's syntax, as the `tokenizers` library has it.

What a tree cannot say (references, what repeats an empty match) is refused by name.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

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
