"""Methods that take the fields of an options class as arguments."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from qsf.options import described

if TYPE_CHECKING:
    from collections.abc import Callable

_P = ParamSpec("_P")
_Self = TypeVar("_Self")
_First = TypeVar("_First")
_Options = TypeVar("_Options")
_Result = TypeVar("_Result")


def taking(
    options: Callable[_P, _Options],
) -> Callable[
    [Callable[[_Self, _First, _Options], _Result]],
    Callable[Concatenate[_Self, _First, _P], _Result],
]:
    """Make a method ``(self, first, options)`` callable as ``(self, first, name=value, ...)``.

    Type checkers, editors and ``help()`` show the options as arguments.
    """

    def decorate(
        method: Callable[[_Self, _First, _Options], _Result],
    ) -> Callable[Concatenate[_Self, _First, _P], _Result]:
        own = list(inspect.signature(method).parameters.values())[:2]
        first_name = own[1].name

        @functools.wraps(method)
        def call(self: _Self, *args: Any, **arguments: Any) -> _Result:
            if not args and first_name in arguments:
                args = (arguments.pop(first_name),)
            if len(args) != 1:
                raise TypeError(
                    f"{method.__qualname__}() takes {first_name}, and options by name; "
                    f"{len(args)} arguments without a name were given"
                )
            return method(self, args[0], options(**arguments))  # type: ignore[call-arg]

        signature = inspect.Signature([*own, *inspect.signature(options).parameters.values()])
        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__doc__ = _with_options(method.__doc__ or "", options)
        return call  # type: ignore[return-value]

    return decorate


def call_with(
    method: Callable[Concatenate[_First, ...], _Result], first: _First, options: object
) -> _Result:
    """Call a bound method of `taking` with options that are already checked."""
    bound: Any = method
    result: _Result = bound.__func__.__wrapped__(bound.__self__, first, options)
    return result


def _with_options(text: str, options: Any) -> str:
    """Return a docstring with the options in place of ``{options}``."""
    lines = [f"{o.name}: {o.help_text}." for o in described(options)]
    return text.replace("{options}", "\n            ".join(lines))
