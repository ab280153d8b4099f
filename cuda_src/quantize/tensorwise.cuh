// One scale for a whole matrix, in one launch: scale = max(max |x| / MAX, 2**-126), data = encode(x * (1 / scale)).
//
// The blocks find the largest magnitude, reduce it over the grid (common/grid_reduce.cuh), and each encodes what it has
// read. Vectors of 8 are dealt to the threads of the grid round-robin, one per thread in each iteration. A thread keeps
// the vectors of its first KEPT iterations in registers and those of the next SHARED_VECS in shared memory. It reads
// the others once more, CHUNK at a time and backwards, while L2 still holds the latest of them.
//
// Constants: INPUT FORMAT SCALE_FORMAT THREADS KEPT SHARED_VECS CHUNK ALIGNMENT, and
//   CLUSTER  the blocks of the launch, which is one cluster (1: one block); 0: a resident grid (grid_reduce.cuh);
//   WHOLE    registers and shared memory hold all of the matrix: nothing is read again;
//   FLAT     rows follow each other without gaps, in x and in data, so that the matrix is one long row and finding a
//            vector takes no division.
// The caller owes: addresses are multiples of ALIGNMENT, and so are strides of rows, unless FLAT with no padded rows;
// dynamic shared memory for THREADS * SHARED_VECS vectors.
#pragma once
constexpr int ALIGNMENT = FP8_ALIGNMENT, CHUNK = FP8_CHUNK, CLUSTER = FP8_CLUSTER, FLAT = FP8_FLAT, FORMAT = FP8_FORMAT,
              GROUP_COLS = FP8_GROUP_COLS, GROUP_ROWS = FP8_GROUP_ROWS, INPUT = FP8_INPUT, KEPT = FP8_KEPT,
              MODE = FP8_MODE, SCALE_FORMAT = FP8_SCALE_FORMAT, SHARED_VECS = FP8_SHARED_VECS, THREADS = FP8_THREADS,
              WHOLE = FP8_WHOLE;
#include "../common/grid_reduce.cuh"
#include "../common/vec8.cuh"

KERNEL(THREADS)
quantize_tensorwise(QUANTIZE_PARAMETERS) {
    DYNAMIC_SHARED(shared);
    constexpr int ITEM = SIZE_OF<INPUT>, PLANES = Vec8<INPUT>::WORDS / 4;
    const long long row_vecs = (cols + 7) / 8, vecs = FLAT ? rows * cols / 8 : rows * row_vecs;
    const int tail = FLAT ? static_cast<int>(rows * cols % 8) : 0;  // elements after the last vec
    // They are one more vector, of a thread that has none then; in a resident grid block 0 has them beside its own.
    constexpr bool TAIL_IS_VEC = FLAT && CLUSTER > 0;
    const long long all_vecs = vecs + (TAIL_IS_VEC && tail ? 1 : 0);
    const long long first = static_cast<long long>(block_x()) * THREADS + thread_x();
    // The step from one iteration of a thread to its next. If t < vecs, some thread has a vector in the iteration at t;
    // if t + n * step <= vecs, every thread has one in each of n iterations from t on.
    const long long step = static_cast<long long>(CLUSTER ? CLUSTER : grid_x()) * THREADS;
    // In a chunk of CHUNK iterations in which every thread has a vector, the vectors of a block are consecutive.
    auto in_chunk = [&](long long chunk, int v) {
        return chunk + (static_cast<long long>(block_x()) * (CHUNK - 1) + v) * THREADS;
    };

    auto row_of = [&](long long vec) -> long long {
        const bool short_ones = vecs < 0x100000000ll;  // a 64-bit division takes four times as long
        if (!short_ones) return vec / row_vecs;
        return static_cast<unsigned>(vec) / static_cast<unsigned>(row_vecs);
    };
    // sure: the thread is known to have a vector in this iteration. once: the vector is not read again.
    auto load = [&](long long iteration, bool sure, bool once) {
        const long long vec = first + iteration;
        if (!sure && vec >= all_vecs) return empty_vec8<INPUT>();
        const byte* p = x + vec * (8 * ITEM);
        if (TAIL_IS_VEC && !sure && vec == vecs) return load_vec8_head<INPUT>(p, tail);
        if constexpr (!FLAT) {
            const long long row = row_of(vec), col = (vec - row * row_vecs) * 8;
            p = x + (row * x_stride + col) * ITEM;
            if (cols - col < 8) return load_vec8_head<INPUT>(p, static_cast<int>(cols - col));
        }
        return once ? load_vec8<INPUT, ALIGNMENT, true>(p) : load_vec8<INPUT, ALIGNMENT>(p);
    };
    auto load_tail = [&] { return load_vec8_head<INPUT>(x + vecs * (8 * ITEM), tail); };
    auto store = [&](long long iteration, bool sure, Vector8 codes) {
        const long long vec = first + iteration;
        if (!sure && vec >= all_vecs) return;
        byte* p = data + vec * 8;
        if (TAIL_IS_VEC && !sure && vec == vecs) return store_vec8_head(p, codes, tail);
        if constexpr (!FLAT) {
            const long long row = row_of(vec), col = (vec - row * row_vecs) * 8;
            p = data + row * data_stride + col;
            if (cols - col < 8) return store_vec8_head(p, codes, static_cast<int>(cols - col));
        }
        store_vec8<ALIGNMENT, true>(p, codes);
    };
    auto shared_at = [&](int iteration, int plane) {
        return shared + ((iteration * PLANES + plane) * THREADS + thread_x()) * 16;
    };
    auto put = [&](int iteration, const Vec8<INPUT>& vec) {
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane) {
            const unsigned* const w = vec.words + 4 * plane;
            store16(shared_at(iteration, plane), {w[0], w[1], w[2], w[3]});
        }
    };
    auto get = [&](int iteration) {
        Vec8<INPUT> vec;
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane) {
            const Vector16 v = load16(shared_at(iteration, plane));
            unsigned* const w = vec.words + 4 * plane;
            w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
        }
        return vec;
    };

    GridMax<THREADS, CLUSTER> grid_max;
    grid_dependency_launch();
    if constexpr (CLUSTER > 0) grid_max.begin();
    grid_dependency_wait();

    Vec8<INPUT> kept[KEPT], passing[CHUNK];
    if (KEPT * step <= vecs) {
#pragma unroll
        for (int v = 0; v < KEPT; ++v) kept[v] = load(v * step, true, true);
    } else {
#pragma unroll
        for (int v = 0; v < KEPT; ++v) kept[v] = load(v * step, false, true);
    }
    if constexpr (CLUSTER == 0) grid_max.begin();

    // Iterations that do not fill a chunk for every thread are done one at a time.
    AbsMax<INPUT> largest;
    const long long in_shared = KEPT * step, passed = in_shared + SHARED_VECS * step;
    int iteration = 0;
#pragma unroll 1
    for (; iteration + CHUNK <= SHARED_VECS && in_shared + (iteration + CHUNK) * step <= vecs; iteration += CHUNK) {
#pragma unroll
        for (int v = 0; v < CHUNK; ++v) passing[v] = load(in_shared + (iteration + v) * step, true, true);
#pragma unroll
        for (int v = 0; v < CHUNK; ++v) {
            largest.update(passing[v]);
            put(iteration + v, passing[v]);
        }
    }
#pragma unroll 1
    for (; iteration < SHARED_VECS && in_shared + iteration * step < vecs; ++iteration) {
        const Vec8<INPUT> vec = load(in_shared + iteration * step, false, true);
        largest.update(vec);
        put(iteration, vec);
    }
    long long next = passed;
#pragma unroll 1
    for (; !WHOLE && next + CHUNK * step <= vecs; next += CHUNK * step) {
#pragma unroll
        for (int v = 0; v < CHUNK; ++v) passing[v] = load(in_chunk(next, v), true, false);
#pragma unroll
        for (int v = 0; v < CHUNK; ++v) largest.update(passing[v]);
    }
    const long long chunks_end = next;
#pragma unroll 1
    for (; !WHOLE && next < vecs; next += step) largest.update(load(next, false, false));
#pragma unroll
    for (int v = 0; v < KEPT; ++v) {
        if (v * step < all_vecs) largest.update(kept[v]);
    }
    if (!TAIL_IS_VEC && tail && first == 0) largest.update(load_tail());

    const unsigned amax_bits = grid_max.largest(largest.bits());
    const float scale = rounded_scale<SCALE_FORMAT>(scale_of<TENSOR, FORMAT>(amax_bits, 0.0f, 0.0f));
    const Divisor divisor = prepared<TENSOR>(scale);
    if (first == 0) store_scale<SCALE_FORMAT>(scales, 0, scale);

#pragma unroll 1
    while (!WHOLE && next > chunks_end) {
        next -= step;
        store(next, false, encode_vec8<INPUT, FORMAT, TENSOR>(load(next, false, false), divisor));
    }
#pragma unroll 1
    while (!WHOLE && next > passed) {
        next -= CHUNK * step;
#pragma unroll
        for (int v = CHUNK - 1; v >= 0; --v) passing[v] = load(in_chunk(next, v), true, false);
#pragma unroll
        for (int v = CHUNK - 1; v >= 0; --v) {
            store(in_chunk(next, v), true, encode_vec8<INPUT, FORMAT, TENSOR>(passing[v], divisor));
        }
    }
#pragma unroll 1
    while (--iteration >= 0) {
        store(in_shared + iteration * step, false, encode_vec8<INPUT, FORMAT, TENSOR>(get(iteration), divisor));
    }
#pragma unroll
    for (int v = 0; v < KEPT; ++v) {
        if (v * step < all_vecs) store(v * step, false, encode_vec8<INPUT, FORMAT, TENSOR>(kept[v], divisor));
    }
    if (!TAIL_IS_VEC && tail && first == 0) {
        store_vec8_head(data + vecs * 8, encode_vec8<INPUT, FORMAT, TENSOR>(load_tail(), divisor), tail);
    }

    for (long long i = first; i < (rows_padded - rows) * row_vecs; i += step) {
        const long long row = rows + i / row_vecs, col = i % row_vecs * 8;
        byte* const p = data + row * data_stride + col;
        if (cols - col >= 8) {
            store_vec8<ALIGNMENT>(p, {0, 0});
        } else {
            store_vec8_head(p, {0, 0}, static_cast<int>(cols - col));
        }
    }
}
