"""A chat template that renders the same text every day.

Some templates write today's date into the prompt (``strftime_now``). Tokens must not change over
night, so the date is fixed: the template gets its own ``strftime_now`` that spells 26 July 2024, the
date that templates with a default use themselves.
"""

from __future__ import annotations

from typing import TypeVar

Template = TypeVar("Template", str, dict[str, str], None)

DATE_PARTS = {
    "%d": "26",
    "%b": "Jul",
    "%B": "July",
    "%m": "07",
    "%Y": "2024",
    "%y": "24",
    "%A": "Friday",
    "%a": "Fri",
    "%H": "00",
    "%M": "00",
    "%S": "00",
}
_FILTERS = "".join(f"|replace('{part}','{value}')" for part, value in DATE_PARTS.items())
FIXED_DATE = "{% macro strftime_now(format) %}{{ format" + _FILTERS + " }}{% endmacro %}"


def pin_date(template: Template) -> Template:
    """The template with a fixed date; unchanged when it asks for none. Named templates one by one."""
    if isinstance(template, dict):
        return {name: pin_date(text) for name, text in template.items()}
    if template is None or "strftime_now" not in template or template.startswith(FIXED_DATE):
        return template
    return FIXED_DATE + template
