#include "../../platform.cuh"
#include "../generic/codes.cuh"

// Copies of a [m, k] for the weight's channels of each residue modulo the grid's height (phases.cuh): in the i-th, rows
// of `ld` codes begin with as many zeros as lie between a multiple of 16 bytes and the i-th row of b, and end with zeros.
// Copies are `copy_rows` rows apart, and what they have beyond m stays as it is. The caller owes: out aligned to 16, ld a
// multiple of 16, of at least k + 15, and fewer than 2**31 pieces of 16 codes in a copy.
KERNEL(256)
shift_codes(const byte* a, long long lda, byte* out, const byte* b, long long ldb, int m, int k, int ld,
            int copy_rows) {
    grid_dependency_launch();
    grid_dependency_wait();
    const unsigned across = unsigned(ld) / PIECE, of_copy = unsigned(m) * across;
    const int offset = int(off_word(b + block_y() * ldb));
    const byte* const end = end_of(a, lda, m, k);
    byte* const copy = out + static_cast<long long>(block_y()) * copy_rows * ld;
    for (unsigned i = block_x() * 256 + thread_x(); i < of_copy; i += grid_x() * 256) {
        const unsigned row = i / across, piece = i - row * across;
        const int at = int(piece) * PIECE - offset;
        const byte* const from = a + row * lda + at;
        Pieces<false, 1> pieces;
        pieces.load<true>(from, k - at, a, end);
        const Vector16 codes = pieces.codes(0, from, k - at);
        unsigned words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int before = -at - 4 * j;  // bytes of the word that precede the row
            if (before > 0) words[j] = before >= 4 ? 0 : words[j] & 0xffffffffu << 8 * before;
        }
        store16(copy + static_cast<long long>(i) * PIECE, {words[0], words[1], words[2], words[3]});
    }
}
