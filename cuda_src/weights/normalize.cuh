// Converts codes to the other E4M3, in which the same byte has half (FNUZ) or twice the value, and doubles (FNUZ) or
// halves all scales, in one launch. The real values stay the same, but +-240 of fnuz become their nearest, +-224.
// fn -> fnuz: 0x80 (-0) -> 0x00, 0x7f and 0xff (NaN) -> 0x80, all else the same byte.
// fnuz -> fn: 0x80 (NaN) -> 0x7f, 0x7f and 0xff (+-240) -> 0x7e and 0xfe (+-448), all else the same byte.
//
// A block takes THREADS * NORMALIZE_VECTORS vectors of codes; all threads of the grid divide the scales. out may be
// weight, and likewise for scales. The caller owes: if VECTOR is 16, weight and out aligned to 16 bytes.
#pragma once
#include "../common/values.cuh"

constexpr int NORMALIZE_VECTORS = 2;

// Four codes at once: the bytes of a word never carry into each other.
template <int FNUZ>
DEVICE unsigned normalize_word(unsigned codes) {
    const unsigned absolute = codes & 0x7f7f7f7fu;
    const unsigned all_ones = (absolute + 0x01010101u) & 0x80808080u;  // bit 7 of bytes 0x7f and 0xff
    const unsigned nonzero = (absolute + 0x7f7f7f7fu) & 0x80808080u;   // bit 7 of bytes other than 0x00 and 0x80
    if constexpr (!FNUZ) return codes - ((all_ones | (codes & ~nonzero & 0x80808080u)) >> 7);
    const unsigned kept = codes & (nonzero | 0x7f7f7f7fu);
    return (kept & ~((all_ones >> 7) * 0xffu)) | all_ones;
}

template <int FNUZ>
DEVICE void normalize_scales(const float* scale, float* out, long long count, long long thread, long long threads) {
    for (long long i = thread; i < count; i += threads) out[i] = multiply_exact(scale[i], FNUZ ? 2.0f : 0.5f);
}

template <int FNUZ, int VECTOR, int THREADS>
DEVICE void normalize_all(const byte* weight, byte* out, long long count, const float* scale, float* scale_out,
                          long long scale_count, const float* input_scale, float* input_scale_out,
                          long long input_scale_count) {
    const long long first = ((long long)block_x() * (THREADS * NORMALIZE_VECTORS) + thread_x()) * VECTOR;
    grid_dependency_launch();
    grid_dependency_wait();
    Words<VECTOR> codes[NORMALIZE_VECTORS];
#pragma unroll
    for (int i = 0; i < NORMALIZE_VECTORS; ++i) {
        const long long at = first + i * (THREADS * VECTOR);
        if (at < count) codes[i].template load<1>(weight + at, count - at < VECTOR ? int(count - at) : VECTOR);
    }
#pragma unroll
    for (int i = 0; i < NORMALIZE_VECTORS; ++i) {
        const long long at = first + i * (THREADS * VECTOR);
        if (at >= count) break;
#pragma unroll
        for (int j = 0; j < Words<VECTOR>::WORDS; ++j) codes[i].words[j] = normalize_word<FNUZ>(codes[i].words[j]);
        codes[i].template store<1>(out + at, count - at < VECTOR ? int(count - at) : VECTOR);
    }
    const long long thread = (long long)block_x() * THREADS + thread_x(), threads = (long long)grid_x() * THREADS;
    normalize_scales<FNUZ>(scale, scale_out, scale_count, thread, threads);
    normalize_scales<FNUZ>(input_scale, input_scale_out, input_scale_count, thread, threads);
}

KERNEL(FP8_THREADS)
normalize(const byte* weight, byte* out, long long code_count, const float* scale, float* scale_out,
          long long scale_count, const float* input_scale, float* input_scale_out, long long input_scale_count) {
    normalize_all<FP8_TO_FNUZ, FP8_VECTOR, FP8_THREADS>(weight, out, code_count, scale, scale_out, scale_count,
                                                        input_scale, input_scale_out, input_scale_count);
}
