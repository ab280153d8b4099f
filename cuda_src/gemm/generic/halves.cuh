// Converts two codes to two fp16 numbers in a word, by integer arithmetic.
#pragma once

// Two e4m3fn codes, each the upper byte of a half of `pair`, as fp16 numbers times 2**-8; NaN stays NaN. (The four
// exponent bits become the lower ones of fp16's five, whose bias is larger by 8. Only 0x7f carries into the fifth bit
// when one is added to its last bit.)
DEVICE unsigned e4m3fn_as_halves(unsigned pair) {
    const unsigned halves = (pair & 0x80008000u) | (pair >> 1 & 0x3f803f80u);
    return halves | ((halves + 0x00800080u) & 0x40004000u);
}
