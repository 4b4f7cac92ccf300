"""What the engine and its tools raise, all of it a ``QsfError``.

- ``QsfArgumentError``, also a ``ValueError``
- ``QsfMemoryError``, also a ``MemoryError``
- ``QsfIOError``, also an ``OSError``
- ``QsfFormatError``
  - ``QsfUnsupportedError``
- ``QsfCancelledError``
- ``QsfNumericError``, also an ``ArithmeticError``
- ``QsfConversionError``
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qsf.native.binding import MemoryPlan


class QsfError(Exception):
    """Any failure reported by QSF."""


class QsfArgumentError(QsfError, ValueError):
    """A documented rule about the arguments was broken."""


class QsfMemoryError(QsfError, MemoryError):
    """The request does not fit in the memory budget.

    Attributes:
        plan: where the memory of a model would have gone, and the smallest budget that would do;
            None where the error is not about opening one.
    """

    def __init__(self, text: str, plan: MemoryPlan | None = None) -> None:
        """Say what does not fit."""
        super().__init__(text)
        self.plan = plan


class QsfIOError(QsfError, OSError):
    """The operating system refused an open, a read or a write."""


class QsfFormatError(QsfError):
    """The file is damaged or is not a QSF file."""


class QsfUnsupportedError(QsfFormatError):
    """The file is well formed, but not what this build reads."""


class QsfCancelledError(QsfError):
    """The call was stopped by ``Session.cancel()``."""


class QsfNumericError(QsfError, ArithmeticError):
    """The model produced NaN or infinity."""


class QsfConversionError(QsfError):
    """A checkpoint cannot be converted: what is missing, wrong or not supported."""
