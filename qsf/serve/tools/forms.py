"""The form that a request demands of its answer: ``response_format``, ``structured_outputs``."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from qsf.errors import QsfArgumentError, shown
from qsf.serve.http.problems import Problem, invalid
from qsf.text.constraints import KINDS

if TYPE_CHECKING:
    from qsf.serve.http.fields import Fields
    from qsf.text.constraints import Constraint, Constraints


class AnswerForm(NamedTuple):
    """A kind of ``Constraints.make``, its value, and the request's field.

    ``is_strict``: all keywords of its schemas must be enforced.
    """

    kind: str
    value: Any
    place: str
    is_strict: bool = False


def read_form(fields: Fields, formats: Fields, name: str) -> AnswerForm | None:
    """Return the form that the answer must have; None: any.

    Args:
        fields: of the request, for ``structured_outputs`` and ``grammar``.
        formats: OpenAI's object with the type of the answer.
        name: name of that object.
    """
    forms: list[AnswerForm] = []
    kind = formats.text("type", "text")
    if kind == "json_object":
        forms.append(AnswerForm("json", {"type": "object"}, name))
    elif kind == "json_schema":
        place = formats.object("json_schema") if "json_schema" in formats else formats
        place.ignore("name", "description")
        is_strict = place.flag("strict")
        forms.append(AnswerForm("json", place.raw("schema"), place.name("schema"), is_strict))
    elif kind != "text":
        raise invalid(
            name, f"{name}.type must be text, json_object or json_schema, not {shown(kind)}"
        )
    outputs = fields.object("structured_outputs")
    for kind in KINDS:
        value = outputs.raw(kind)
        if value is not None:
            forms.append(AnswerForm(kind, value, outputs.name(kind)))
    outputs_rest: Sequence[str] = outputs.rest()
    if outputs_rest:
        raise invalid(outputs_rest[0], f"{outputs_rest[0]} is not known", "unsupported_parameter")
    grammar = fields.raw("grammar")
    if grammar is not None:
        forms.append(AnswerForm("grammar", grammar, "grammar"))
    if len(forms) > 1:
        names = " and ".join(form.place for form in forms)
        raise invalid(forms[0].place, f"{names} are both given: an answer has one form")
    return forms[0] if forms else None


def constrain(constraints: Constraints | str, form: AnswerForm) -> Constraint:
    """Return the constraint of a form. Raises Problem for a form that cannot be enforced."""
    try:
        constraint = need_constraints(constraints, form.place).make(*form[:3])
    except QsfArgumentError as error:
        raise invalid(form.place, str(error), "invalid_grammar") from None
    if form.is_strict and constraint.unenforced:
        text = f"{form.place} is strict, and {', '.join(sorted(constraint.unenforced))} cannot be "
        raise invalid(form.place, f"{text}enforced while an answer is written", "invalid_grammar")
    return constraint


def need_constraints(constraints: Constraints | str, place: str) -> Constraints:
    """Return the maker of constraints. Raises Problem if the server has none."""
    if isinstance(constraints, str):
        raise Problem(
            400,
            "unsupported_parameter",
            f"{place} cannot be enforced: {constraints}",
            param=place,
        )
    return constraints
