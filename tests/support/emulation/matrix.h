// The matrix instructions of AMD GPUs, with operands spread over a wave's lanes as in the ISA documents: first FP8.
//
// A lane holds eight bytes of row lane % 16 of A (16 x DEPTH) from k = 8 * (lane / 16), and the same bytes of column
// lane % 16 of B (DEPTH x 16). Its register r holds the element of D = A * B + C in column lane % 16 and row
//   v_mfma_f32_16x16x32 (gfx942, gfx950; 64 lanes, DEPTH 32, 4 registers): 4 * (lane / 16) + r
//   v_wmma_f32_16x16x16 (gfx12;          32 lanes, DEPTH 16, 8 registers): 8 * (lane / 16) + r
// Sums are fp32 in ascending k, an order that the hardware does not guarantee; all lanes of the wave must take part.
#pragma once

template <class T>
struct __align__(8 * sizeof(T)) EmulatedVector<T, 8> {
    T of[8];
    T &operator[](int i) { return of[i]; }
    const T &operator[](int i) const { return of[i]; }
};

EMULATED void __builtin_amdgcn_sched_barrier(int) {}

// Decodes e5m2 if BF8, else e4m3.
template <bool BF8>
float emulated_code(uint64_t eight, int i) {
    const int codes = static_cast<int>(eight >> (8 * i) & 0xFF);
    return BF8 ? __builtin_amdgcn_cvt_f32_bf8(codes, 0) : __builtin_amdgcn_cvt_f32_fp8(codes, 0);
}

template <bool A_BF8, bool B_BF8, int REGISTERS>
EmulatedVector<float, REGISTERS> emulated_matrix(uint64_t a, uint64_t b, EmulatedVector<float, REGISTERS> c) {
    constexpr unsigned LANES = 256 / REGISTERS, PARTS = LANES / 16;
    const EmulatedThread *here = emulation_thread();
    if (here->warp_size != LANES) emulation_trap("a matrix instruction of another size of waves");
    uint64_t column[PARTS];
    for (unsigned part = 0; part < PARTS; part++)
        column[part] = emulated_exchange(EMULATED_WHOLE_WARP, b, here->lane % 16 + 16 * part);
    for (unsigned r = 0; r < REGISTERS; r++) {
        for (unsigned part = 0; part < PARTS; part++) {
            // The lanes of a part need the same row: the whole wave exchanges once for each part.
            const unsigned source = REGISTERS * (here->lane / 16) + r + 16 * part;
            const uint64_t row = emulated_exchange(EMULATED_WHOLE_WARP, a, source);
            for (int i = 0; i < 8; i++) c[r] += emulated_code<A_BF8>(row, i) * emulated_code<B_BF8>(column[part], i);
        }
    }
    return c;
}

#if defined(__gfx942__) || defined(__gfx950__)
#define EMULATED_MFMA(a, b, a_bf8, b_bf8)                                                                              \
    inline EmulatedVector<float, 4> __builtin_amdgcn_mfma_f32_16x16x32_##a##_##b(long x, long y,                       \
                                                                                 EmulatedVector<float, 4> c, int,     \
                                                                                 int, int) {                          \
        return emulated_matrix<a_bf8, b_bf8, 4>(static_cast<uint64_t>(x), static_cast<uint64_t>(y), c);                \
    }
EMULATED_MFMA(fp8, fp8, false, false)
EMULATED_MFMA(fp8, bf8, false, true)
EMULATED_MFMA(bf8, fp8, true, false)
#elif defined(__gfx1200__) || defined(__gfx1201__)
#define EMULATED_WMMA(a, b, a_bf8, b_bf8)                                                                              \
    inline EmulatedVector<float, 8> __builtin_amdgcn_wmma_f32_16x16x16_##a##_##b##_w32_gfx12(                          \
        EmulatedVector<int, 2> x, EmulatedVector<int, 2> y, EmulatedVector<float, 8> c) {                              \
        return emulated_matrix<a_bf8, b_bf8, 8>(emulated_bits<uint64_t>(x), emulated_bits<uint64_t>(y), c);            \
    }
EMULATED_WMMA(fp8, fp8, false, false)
EMULATED_WMMA(fp8, bf8, false, true)
EMULATED_WMMA(bf8, fp8, true, false)
#endif

// bf16: a lane holds N elements along k of row (column) lane % 16 of A (B), from k = N * (lane / 16); on gfx11 both
// halves of a wave hold the same, and PARTS is 1. Its register r holds the element of D in column lane % 16 and row
//   v_mfma_f32_16x16x16bf16_1k (64 lanes): 4 * (lane / 16) + r      v_wmma_f32_16x16x16_bf16 of gfx12: 8 * (lane / 16) + r
//   v_wmma_f32_16x16x16_bf16 of gfx11: 2 * r + lane / 16
template <int LANES, int PARTS, bool ALTERNATE, int N, int REGISTERS>
EmulatedVector<float, REGISTERS> emulated_bf16(EmulatedVector<short, N> a, EmulatedVector<short, N> b,
                                               EmulatedVector<float, REGISTERS> c) {
    const EmulatedThread *here = emulation_thread();
    if (here->warp_size != LANES) emulation_trap("a matrix instruction of another size of waves");
    uint64_t x[N / 4], y[N / 4];
    __builtin_memcpy(x, &a, sizeof x);
    __builtin_memcpy(y, &b, sizeof y);
    const unsigned half = here->lane / 16;
    for (unsigned part = 0; part < PARTS; part++) {
        for (int four = 0; four < N / 4; four++) {
            const uint64_t column = emulated_exchange(EMULATED_WHOLE_WARP, y[four], here->lane % 16 + 16 * part);
            for (unsigned r = 0; r < REGISTERS; r++) {
                const unsigned at = ALTERNATE ? 2 * r + half : REGISTERS * half + r;
                const uint64_t row = emulated_exchange(EMULATED_WHOLE_WARP, x[four], at + 16 * part);
                for (int i = 0; i < 64; i += 16)
                    c[r] += emulated_bits<float>(static_cast<uint32_t>(row >> i) << 16) *
                            emulated_bits<float>(static_cast<uint32_t>(column >> i) << 16);
            }
        }
    }
    return c;
}
#if defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__)
inline EmulatedVector<float, 4> __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(EmulatedVector<short, 4> x,
                                                                          EmulatedVector<short, 4> y,
                                                                          EmulatedVector<float, 4> c, int, int, int) {
    return emulated_bf16<64, 4, false>(x, y, c);
}
#elif defined(__gfx1200__) || defined(__gfx1201__)
inline EmulatedVector<float, 8> __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(EmulatedVector<short, 8> x,
                                                                                  EmulatedVector<short, 8> y,
                                                                                  EmulatedVector<float, 8> c) {
    return emulated_bf16<32, 2, false>(x, y, c);
}
#elif defined(__gfx1100__)
inline EmulatedVector<float, 8> __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(EmulatedVector<short, 16> x,
                                                                            EmulatedVector<short, 16> y,
                                                                            EmulatedVector<float, 8> c) {
    return emulated_bf16<32, 1, true>(x, y, c);
}
#endif
