"""Numbers inside of options, such as those of 1,16x4096x4096."""


def whole_number(text: str) -> int | None:
    """Return a number of decimal digits that has at most 31 bits, or None for any other text.

    Longer texts are not converted: Python refuses those of more than 4,300 digits.
    """
    if not text.isdecimal() or len(text) > len(str(1 << 31)):
        return None
    number = int(text)
    return number if number < 1 << 31 else None
