"""The time of tasks that overlap."""


def overlapped_us(sharpness: float, *times: float) -> float:
    """Return the time of overlapping tasks: a little more than that of the longest, which hides the others.

    It is the norm of their times with the exponent ``sharpness``: the greater that is, the less a shorter task adds.
    """
    powers = 0.0
    for time in times:
        powers += time**sharpness
    found: float = powers ** (1 / sharpness)
    return found
