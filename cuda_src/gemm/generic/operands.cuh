// The operands of the platform's matrix.cuh: eight codes, if the GPU has instructions for both formats (FP8_DIRECT), or
// the same eight numbers as 16-bit floats, exactly.
#pragma once

#if FP8_DIRECT
using Chunk = Vector8;
template <int FORMAT>
DEVICE Chunk operand(unsigned first, unsigned second) {
    return {first, second};
}
#else
using Chunk = Vector16;
template <int FORMAT>
DEVICE Chunk operand(unsigned first, unsigned second) {
    Chunk result;
    widen<FORMAT>(first, result.x, result.y);
    widen<FORMAT>(second, result.z, result.w);
    return result;
}
#endif
using Fragment = FragmentOf<Chunk>;
