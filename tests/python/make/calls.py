"""Functions that a model may call, and the forms of calls by family."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import Any

from qsf.serve.tools.call_formats import FORMATS, Format

WEATHER: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
ARGUMENTS: Any = {"city": "Ulm } ]", "days": 3, "unit": "C"}


def form_of(name: str) -> Format:
    return next(form for form in FORMATS if form.name.startswith(name))


HERMES = form_of("Hermes")
