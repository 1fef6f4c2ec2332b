"""Strict JSON for all files: what programs read differently is refused.

`parse_json` raises ValueError, with a message that does not name the file, for

- a key given twice in an object, of which Python would keep the last;
- NaN and Infinity, which JSON does not have;
- half a character (the escape \\ud800 without its second half), which UTF-8 cannot encode;
- a whole number with more digits than any count or hash has;
- objects nested too deep.
"""

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any, NoReturn

MOST_DIGITS = 100  # Whole numbers with more digits take long to read; hashes of 256 bits have 78.
SHOWN_DIGITS, SHOWN_CHARS = 20, 60  # An error quotes at most this much of a number, and of a text.


class TwiceError(ValueError):
    """An object of a JSON text has the same key (`key`) twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key!r} is given twice")
        self.key = key


def parse_json(text: str | bytes, *, has_nan: bool = False, counts_digits: bool = True) -> Any:
    """The value of a whole JSON text. Raises ValueError as the module's docstring says, except that with
    `has_nan` NaN and Infinity, which some programs write, are read as floats.

    `counts_digits=False` allows numbers of any length. It is for traces with millions of ids, whose reader
    checks the numbers itself.
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=_parse_object,
            parse_constant=None if has_nan else _refuse_constant,
            parse_int=_parse_whole_number if counts_digits else None,
        )
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except ValueError:
        if counts_digits:
            raise
        # For a number of thousands of digits, which Python refuses, the other parser has a better message.
        return parse_json(text, has_nan=has_nan)
    # Without escapes there is no half character.
    has_escapes = "\\u" in text if isinstance(text, str) else b"\\u" in text
    if has_escapes:
        _check_texts([value])
    return value


def json_decoder() -> json.JSONDecoder:
    """A decoder that can read values from a longer text one by one. Like `parse_json`, it refuses a key given
    twice and a whole number of too many digits; it makes no other check.
    """
    return json.JSONDecoder(object_pairs_hook=_parse_object, parse_int=_parse_whole_number)


def is_text(text: str) -> bool:
    """Whether UTF-8 can encode this text: it has no half characters (lone surrogates) of UTF-16."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _parse_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The members of a JSON object; raises TwiceError for a key given twice."""
    members = dict(pairs)
    if len(members) < len(pairs):
        [(most_frequent_key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise TwiceError(most_frequent_key)
    return members


def _refuse_constant(name: str) -> NoReturn:
    """Raise ValueError for NaN or Infinity, which Python reads and JSON does not have."""
    raise ValueError(f"{name} is no number of JSON")


def _parse_whole_number(digits: str) -> int:
    """A whole number of JSON. Raises ValueError for one of more than MOST_DIGITS digits."""
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"the number {digits[:SHOWN_DIGITS]}... has {len(digits)} digits")
    return int(digits)


def _check_texts(values: Iterable[Any]) -> None:
    """Raise ValueError for half a character anywhere in these values, keys of objects included."""
    unchecked = [values]
    while unchecked:
        for value in unchecked.pop():
            if isinstance(value, str):
                if not is_text(value):
                    raise ValueError(f"the text {ascii(value)[:SHOWN_CHARS]} holds half a character")
            elif isinstance(value, dict):
                unchecked += [value.keys(), value.values()]
            elif isinstance(value, list):
                unchecked.append(value)
