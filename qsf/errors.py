"""What the engine and its tools raise: a ``QsfError``. ``ChildFailedError`` stays inside.

- ``QsfArgumentError``, also a ``ValueError``
  - ``QsfStateError``
- ``QsfMemoryError``, also a ``MemoryError``
- ``QsfIOError``, also an ``OSError``
- ``QsfFormatError``
  - ``QsfUnsupportedError``
- ``QsfCancelledError``
- ``QsfNumericError``, also an ``ArithmeticError``
- ``QsfConversionError``
"""

from __future__ import annotations

import os
import re
import reprlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing_extensions import Self

    from qsf.native.binding import MemoryPlan


MAX_LINE: Final = 1000
MAX_QUOTED: Final = 80
_CUT: Final = " ... (cut here) ... "
# Texts between quotes as `repr` writes them; an apostrophe within a word begins none. A text
# without closing quote goes to the end, else the search would take quadratic time.
_QUOTED: Final = re.compile(
    r"""(?<!\w)(?:'[^'\\]*(?:\\.[^'\\]*)*(?:'|\\?\Z)|"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z))""",
    re.DOTALL,
)


_REPR: Final = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = MAX_QUOTED


def shown(value: object) -> str:
    """Return a foreign value for an error message: at most 80 characters, on one line."""
    text = _REPR.repr(value)
    return text if len(text) <= MAX_QUOTED else f"{text[: MAX_QUOTED - 3]}..."


def clean(text: str) -> str:
    """Return the text without characters that control a terminal or reverse the text."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "?" for c in text)


def one_line(text: str) -> str:
    """Return the text on one line, without characters that control a terminal."""
    return clean(" ".join(text.split()))


def error_line(text: str) -> str:
    """Return the text of an error on one line, without characters that control a terminal.

    It has at most 1000 characters, and 80 of each value that it quotes; cuts are marked.
    """

    def cut(quoted: re.Match[str]) -> str:
        value = quoted[0]
        if len(value) - 2 <= MAX_QUOTED or value[0] != value[-1]:
            return value
        return f"{value[: MAX_QUOTED - 2]}...{value[-1]}"

    if len(text) > 16 * MAX_LINE:  # each escape takes 100 bytes of the search
        for escape in ("\\\\", "\\'", '\\"', "\\"):
            text = text.replace(escape, "?")
    return _cut_middle(one_line(_QUOTED.sub(cut, text)), MAX_LINE)


def _cut_middle(text: str, max_chars: int) -> str:
    """Return a text with a cut in its middle: its start, and its end, which says what to do."""
    if len(text) <= max_chars:
        return text
    n_last = max_chars // 3
    return f"{text[: max_chars - n_last - len(_CUT)]}{_CUT}{text[-n_last:]}"


class QsfError(Exception):
    """Any failure reported by QSF. The text names the argument or file, where there is one.

    Attributes:
        argument: the argument at fault, as Python calls it; None: none.
        path: the file at fault; None: none, or not known here.
        is_damage: bytes of the file have changed since it was written: it must be copied again.
    """

    argument: str | None = None
    path: str | None = None
    is_damage: bool = False

    def __init__(
        self,
        *args: object,
        argument: str | None = None,
        path: str | None = None,
        is_damage: bool | None = None,
    ) -> None:
        super().__init__(*(error_line(arg) if isinstance(arg, str) else arg for arg in args))
        if argument is not None:
            self.argument = argument
        if path is not None:
            self.path = path
        if is_damage is not None:
            self.is_damage = is_damage

    def located(self, path: str | os.PathLike[str]) -> Self:
        """Return the same error with ``path`` before its text."""
        return type(self)(
            f"{os.fspath(path)}: {self}",
            argument=self.argument,
            path=os.fspath(path),
            is_damage=self.is_damage,
        )


class QsfArgumentError(QsfError, ValueError):
    """A documented rule about the arguments was broken."""


class QsfStateError(QsfArgumentError):
    """The model or session cannot be used now, or not here: closed, busy, or of another process."""


class QsfMemoryError(QsfError, MemoryError):
    """The request does not fit in the memory budget.

    Attributes:
        plan: the memory plan of the model, with the smallest budget that is enough; None if no
            model was being opened.
    """

    def __init__(
        self, text: str, plan: MemoryPlan | None = None, *, argument: str | None = None
    ) -> None:
        super().__init__(text, argument=argument)
        self.plan = plan


class QsfIOError(QsfError, OSError):
    """The operating system refused an open, a read or a write."""


class QsfFormatError(QsfError):
    """The file is damaged or is not a QSF file."""


class QsfUnsupportedError(QsfFormatError):
    """The file is well formed, but this build cannot read it."""


class QsfCancelledError(QsfError):
    """The call was stopped by ``cancel()``."""


class QsfNumericError(QsfError, ArithmeticError):
    """The model produced NaN or infinity."""


class QsfConversionError(QsfError):
    """A checkpoint cannot be converted: a part is missing, wrong or not supported."""


class ChildFailedError(Exception):
    """A download or conversion failed and has printed why."""

    def __init__(self, exit_code: int) -> None:
        super().__init__()
        self.exit_code = exit_code
