"""Options whose value is several whole numbers with commas."""

from __future__ import annotations

from expertwire.errors import InvalidArgumentError


def whole_numbers(option: str, text: str, least: int | None = None, *, form: str = "whole numbers with commas") -> tuple[int, ...]:
    """`4096,512,128`. `form`: what the error asks for where one is none."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidArgumentError(f"{option} is {text!r}; give {form}") from None
    if least is not None and min(numbers) < least:
        raise InvalidArgumentError(f"{option} is {text}; the least is {least}")
    return numbers
