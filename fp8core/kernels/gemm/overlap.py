"""The time of work that overlaps."""


def overlapped_us(sharpness: float, *times: float) -> float:
    """Return the microseconds that times take together: a little more than the longest, which hides the others.

    It is their norm with the exponent ``sharpness``: the greater that is, the less does a shorter time add.
    """
    powers = 0.0
    for time in times:
        powers += time**sharpness
    found: float = powers ** (1 / sharpness)
    return found
