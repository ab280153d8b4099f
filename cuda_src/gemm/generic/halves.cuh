// Two codes as two fp16 numbers in a word, by integers.
#pragma once

// Of two e4m3fn codes, each the upper byte of a half of `pair`: their fp16 numbers, 2**-8 as large; NaN is NaN.
// (The exponent's four bits stand at the low end of fp16's five, whose bias is 8 larger. Only 0x7f carries into the
// fifth bit when one is added to its last.)
DEVICE unsigned e4m3fn_as_halves(unsigned pair) {
    const unsigned halves = (pair & 0x80008000u) | (pair >> 1 & 0x3f803f80u);
    return halves | ((halves + 0x00800080u) & 0x40004000u);
}
