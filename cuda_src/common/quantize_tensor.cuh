// One scale for a whole matrix, in one launch: scale = max(max |x| / MAX, 2**-126), data = encode(x * (1 / scale)).
//
// The blocks find the largest size, meet (meeting.cuh), then each encodes what it read. Octets are dealt to the threads
// of the grid in turns. Of the first turns a thread keeps KEPT in registers and SHARED_OCTETS in shared memory; the
// others, CHUNK at a time, are read once more, backwards, while the second cache still holds the latest of them.
//
// Constants: INPUT FORMAT SCALE_FORMAT THREADS KEPT SHARED_OCTETS CHUNK ALIGNMENT, and
//   CLUSTER  the blocks of the launch, which is one cluster (1: a block); 0: a resident grid, as meeting.cuh has it;
//   WHOLE    registers and shared memory hold all of the matrix: nothing is read again;
//   FLAT     rows follow each other without gaps, in x and in data, so that the matrix is one long row and no division
//            is needed to find an octet.
// The caller owes: addresses are multiples of ALIGNMENT, and so are strides of rows, but for FLAT where no row is padded;
// THREADS * SHARED_OCTETS octets of dynamic shared memory.
#pragma once
#include "meeting.cuh"
#include "quantize_octet.cuh"

KERNEL(THREADS)
quantize_tensor(QUANTIZE_PARAMETERS) {
    DYNAMIC_SHARED(shared);
    constexpr int ITEM = ITEM_BYTES[INPUT], PLANES = Octet<INPUT>::WORDS / 4;
    const long long row_octets = (cols + 7) / 8, octets = FLAT ? rows * cols / 8 : rows * row_octets;
    const int tail = FLAT ? static_cast<int>(rows * cols % 8) : 0;  // elements after the last octet, block 0's
    const long long first = static_cast<long long>(block_x()) * THREADS + thread_x();
    // From one turn of a thread to its next. Some thread has an octet in the turn at t when t < octets, and every
    // thread one in all of n turns from t when t + n * step <= octets.
    const long long step = static_cast<long long>(CLUSTER ? CLUSTER : grid_x()) * THREADS;
    // Of a chunk of CHUNK turns that every thread has all of, the block's octets lie together.
    auto in_chunk = [&](long long chunk, int v) {
        return chunk + (static_cast<long long>(block_x()) * (CHUNK - 1) + v) * THREADS;
    };

    auto row_of = [&](long long octet) -> long long {
        const bool short_ones = octets < 0x100000000ll;  // a division of 64 bits takes four times as long
        if (!short_ones) return octet / row_octets;
        return static_cast<unsigned>(octet) / static_cast<unsigned>(row_octets);
    };
    // sure: the thread is known to have an octet in this turn. once: it will not be read again.
    auto load = [&](long long turn, bool sure, bool once) {
        const long long octet = first + turn;
        if (!sure && octet >= octets) return empty_octet<INPUT>();
        const byte* p = x + octet * (8 * ITEM);
        if constexpr (!FLAT) {
            const long long row = row_of(octet), col = (octet - row * row_octets) * 8;
            p = x + (row * x_stride + col) * ITEM;
            if (cols - col < 8) return load_octet_part<INPUT>(p, static_cast<int>(cols - col));
        }
        return once ? load_octet<INPUT, ALIGNMENT, true>(p) : load_octet<INPUT, ALIGNMENT>(p);
    };
    auto load_tail = [&] { return load_octet_part<INPUT>(x + octets * (8 * ITEM), tail); };
    auto store = [&](long long turn, bool sure, Vector8 codes) {
        const long long octet = first + turn;
        if (!sure && octet >= octets) return;
        byte* p = data + octet * 8;
        if constexpr (!FLAT) {
            const long long row = row_of(octet), col = (octet - row * row_octets) * 8;
            p = data + row * data_stride + col;
            if (cols - col < 8) return store_octet_part(p, codes, static_cast<int>(cols - col));
        }
        store_octet<ALIGNMENT, true>(p, codes);
    };
    auto shared_at = [&](int turn, int plane) {
        return shared + ((turn * PLANES + plane) * THREADS + thread_x()) * 16;
    };
    auto put = [&](int turn, const Octet<INPUT>& octet) {
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane) {
            const unsigned* const w = octet.words + 4 * plane;
            store16(shared_at(turn, plane), {w[0], w[1], w[2], w[3]});
        }
    };
    auto get = [&](int turn) {
        Octet<INPUT> octet;
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane) {
            const Vector16 v = load16(shared_at(turn, plane));
            unsigned* const w = octet.words + 4 * plane;
            w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
        }
        return octet;
    };

    Meeting<THREADS, CLUSTER> meeting;
    grid_dependency_launch();
    grid_dependency_wait();

    Octet<INPUT> kept[KEPT], passing[CHUNK];
    if (KEPT * step <= octets) {
#pragma unroll
        for (int v = 0; v < KEPT; ++v) kept[v] = load(v * step, true, true);
    } else {
#pragma unroll
        for (int v = 0; v < KEPT; ++v) kept[v] = load(v * step, false, true);
    }
    meeting.begin();

    // What does not fill CHUNK turns of every thread is done turn by turn.
    Largest<INPUT> largest;
    const long long in_shared = KEPT * step, passed = in_shared + SHARED_OCTETS * step;
    int turn = 0;
#pragma unroll 1
    for (; turn + CHUNK <= SHARED_OCTETS && in_shared + (turn + CHUNK) * step <= octets; turn += CHUNK) {
#pragma unroll
        for (int v = 0; v < CHUNK; ++v) passing[v] = load(in_shared + (turn + v) * step, true, true);
#pragma unroll
        for (int v = 0; v < CHUNK; ++v) {
            largest.see(passing[v]);
            put(turn + v, passing[v]);
        }
    }
#pragma unroll 1
    for (; turn < SHARED_OCTETS && in_shared + turn * step < octets; ++turn) {
        const Octet<INPUT> octet = load(in_shared + turn * step, false, true);
        largest.see(octet);
        put(turn, octet);
    }
    long long next = passed;
#pragma unroll 1
    for (; !WHOLE && next + CHUNK * step <= octets; next += CHUNK * step) {
#pragma unroll
        for (int v = 0; v < CHUNK; ++v) passing[v] = load(in_chunk(next, v), true, false);
#pragma unroll
        for (int v = 0; v < CHUNK; ++v) largest.see(passing[v]);
    }
    const long long chunks_end = next;
#pragma unroll 1
    for (; !WHOLE && next < octets; next += step) largest.see(load(next, false, false));
#pragma unroll
    for (int v = 0; v < KEPT; ++v) {
        if (v * step < octets) largest.see(kept[v]);
    }
    if (tail && first == 0) largest.see(load_tail());

    const unsigned amax_bits = meeting.largest(largest.bits());
    const float scale = settled<SCALE_FORMAT>(scale_of<TENSOR, FORMAT>(amax_bits, 0.0f, 0.0f));
    const Divisor divisor = prepared<TENSOR>(scale);
    if (first == 0) store_scale<SCALE_FORMAT>(scales, 0, scale);

#pragma unroll 1
    while (!WHOLE && next > chunks_end) {
        next -= step;
        store(next, false, encode_octet<INPUT, FORMAT, TENSOR>(load(next, false, false), divisor));
    }
#pragma unroll 1
    while (!WHOLE && next > passed) {
        next -= CHUNK * step;
#pragma unroll
        for (int v = CHUNK - 1; v >= 0; --v) passing[v] = load(in_chunk(next, v), true, false);
#pragma unroll
        for (int v = CHUNK - 1; v >= 0; --v) {
            store(in_chunk(next, v), true, encode_octet<INPUT, FORMAT, TENSOR>(passing[v], divisor));
        }
    }
#pragma unroll 1
    while (--turn >= 0) {
        store(in_shared + turn * step, false, encode_octet<INPUT, FORMAT, TENSOR>(get(turn), divisor));
    }
#pragma unroll
    for (int v = 0; v < KEPT; ++v) {
        if (v * step < octets) store(v * step, false, encode_octet<INPUT, FORMAT, TENSOR>(kept[v], divisor));
    }
    if (tail && first == 0) {
        store_octet_part(data + octets * 8, encode_octet<INPUT, FORMAT, TENSOR>(load_tail(), divisor), tail);
    }

    for (long long i = first; i < (rows_padded - rows) * row_octets; i += step) {
        const long long row = rows + i / row_octets, col = i % row_octets * 8;
        byte* const p = data + row * data_stride + col;
        if (cols - col >= 8) {
            store_octet<ALIGNMENT>(p, {0, 0});
        } else {
            store_octet_part(p, {0, 0}, static_cast<int>(cols - col));
        }
    }
}
