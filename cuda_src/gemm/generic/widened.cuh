// Codes as the 16-bit floats that the platform's half_mma.cuh multiplies, whose `widen` converts four.
#pragma once

// Eight codes as eight numbers of 16 bits.
template <int FORMAT>
DEVICE Vector16 widened(unsigned first, unsigned second) {
    Vector16 result;
    widen<FORMAT>(first, result.x, result.y);
    widen<FORMAT>(second, result.z, result.w);
    return result;
}
