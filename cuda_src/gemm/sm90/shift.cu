#include "../../platform.cuh"
#include "../generic/codes.cuh"

// Copies of a [m, k] for the weight's channels of each residue modulo `phases` (phases.cuh): in the i-th, rows of `ld`
// codes, `copy_rows` apart, begin with as many zeros as lie between a multiple of 16 bytes and the i-th row of b, and end
// with zeros. The other rows of a copy stay as they are. The caller owes: out aligned to 16, ld a multiple of 16, of at
// least k + 15, and fewer than 2**31 pieces of 16 codes in all.
KERNEL(256)
shift_codes(const byte* a, long long lda, byte* out, const byte* b, long long ldb, int m, int k, int ld, int copy_rows,
            int phases) {
    grid_dependency_launch();
    grid_dependency_wait();
    const unsigned across = unsigned(ld) / PIECE, of_copy = unsigned(m) * across;
    const byte* const end = end_of(a, lda, m, k);
    for (unsigned i = block_x() * 256 + thread_x(); i < of_copy * unsigned(phases); i += grid_x() * 256) {
        const unsigned copy = i / of_copy, row = i % of_copy / across, piece = i % across;
        const int offset = int(off_word(b + copy * ldb)), at = int(piece) * PIECE - offset;
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
        const long long to = (static_cast<long long>(copy) * copy_rows + row) * ld + piece * PIECE;
        store16(out + to, {words[0], words[1], words[2], words[3]});
    }
}
