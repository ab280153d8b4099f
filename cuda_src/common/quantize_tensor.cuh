// One scale for a whole matrix, in one launch: scale = max(max |x| / MAX, 2**-126), data = encode(x * (1 / scale)).
//
// A resident grid finds the largest size; its blocks tell each other theirs, then each encodes what it read. Octets are
// dealt to the threads of the grid in turns. Of the first turns a thread keeps KEPT in registers and SHARED_OCTETS in
// shared memory, read past the caches; the others, CHUNK at a time, are read once more, backwards, while the second
// cache still holds the latest of them.
//
// Blocks meet through flags, one a block: a 64-bit word of the launch's epoch and the block's largest size, so nothing
// else has to be ordered. A block finds the epoch in its own flag of the launch before, so the words need no reset
// between launches, no argument that a graph would bake in, and no memory but the module's. What makes this right:
//   - every launch of more than one block has the same grid, one block a multiprocessor, and asks for more than half of
//     a multiprocessor's shared memory: no multiprocessor holds two blocks, from whichever streams or graphs they come;
//   - so a block of launch n + 1 begins only where a block of launch n has ended, that is after all flags n were
//     written; and it passes its own meeting only when all blocks n have ended. Two sets of flags, used by turns, are
//     enough;
//   - the launch is cooperative, so two grids cannot each hold part of the device and wait for the rest.
//
// Constants: INPUT FORMAT SCALE_FORMAT THREADS KEPT SHARED_OCTETS CHUNK ALIGNMENT, and FLAT: rows follow each other
// without gaps, in x and in data, so that the matrix is one long row and no division is needed to find an octet.
// The caller owes: addresses and strides of rows are multiples of ALIGNMENT; a grid of one block with no more than
// KEPT * THREADS octets, or the cooperative grid above with at most THREADS blocks and THREADS * SHARED_OCTETS octets
// of dynamic shared memory.
#pragma once
#include "quantize_octet.cuh"
#include "reduce.cuh"

MODULE_MEMORY word64 quantize_tensor_flags[2][THREADS];

// The largest of all blocks' amax; all threads call it. `epoch` is this launch's, known to thread 0 alone.
DEVICE unsigned grid_max(unsigned amax, unsigned epoch) {
    SHARED unsigned shared_epoch;
    if (thread_x() == 0) shared_epoch = epoch;
    amax = block_max<THREADS, 0>(amax);
    if (grid_x() == 1) return amax;
    epoch = shared_epoch;
    word64* const flags = quantize_tensor_flags[epoch % 2];
    if (thread_x() == 0) store_relaxed(&flags[block_x()], static_cast<word64>(epoch) << 32 | amax);
    if (thread_x() < grid_x()) {
        word64 flag = load_relaxed(&flags[thread_x()]);
        while (flag >> 32 != epoch) {
            pause();
            flag = load_relaxed(&flags[thread_x()]);
        }
        amax = static_cast<unsigned>(flag);
    }
    return block_max<THREADS, 1>(amax);
}

KERNEL(THREADS)
quantize_tensor(QUANTIZE_PARAMETERS) {
    DYNAMIC_SHARED(shared);
    constexpr int ITEM = ITEM_BYTES[INPUT], PLANES = Octet<INPUT>::WORDS / 4;
    const long long row_octets = (cols + 7) / 8, octets = FLAT ? rows * cols / 8 : rows * row_octets;
    const int tail = FLAT ? static_cast<int>(rows * cols % 8) : 0;  // elements after the last octet, block 0's
    const long long first = static_cast<long long>(block_x()) * THREADS + thread_x();
    // From one turn of a thread to its next. Some thread has an octet in the turn at t when t < octets, and every
    // thread one in all of n turns from t when t + n * step <= octets.
    const long long step = static_cast<long long>(grid_x()) * THREADS;

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

    grid_dependency_launch();
    grid_dependency_wait();

    Octet<INPUT> kept[KEPT], passing[CHUNK], last;
    if (KEPT * step <= octets) {
#pragma unroll
        for (int v = 0; v < KEPT; ++v) kept[v] = load(v * step, true, true);
    } else {
#pragma unroll
        for (int v = 0; v < KEPT; ++v) kept[v] = load(v * step, false, true);
    }
    if (tail && first == 0) last = load_octet_part<INPUT>(x + octets * (8 * ITEM), tail);
    unsigned epoch = 0;
    if (thread_x() == 0 && grid_x() > 1) {
        const unsigned even = static_cast<unsigned>(load_relaxed(&quantize_tensor_flags[0][block_x()]) >> 32);
        const unsigned odd = static_cast<unsigned>(load_relaxed(&quantize_tensor_flags[1][block_x()]) >> 32);
        epoch = (static_cast<int>(odd - even) > 0 ? odd : even) + 1;
    }

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
    for (; next + CHUNK * step <= octets; next += CHUNK * step) {
#pragma unroll
        for (int v = 0; v < CHUNK; ++v) passing[v] = load(next + v * step, true, false);
#pragma unroll
        for (int v = 0; v < CHUNK; ++v) largest.see(passing[v]);
    }
    const long long chunks_end = next;
#pragma unroll 1
    for (; next < octets; next += step) largest.see(load(next, false, false));
#pragma unroll
    for (int v = 0; v < KEPT; ++v) {
        if (v * step < octets) largest.see(kept[v]);
    }
    if (tail && first == 0) largest.see(last);

    const unsigned amax_bits = grid_max(largest.bits(), epoch);
    const float scale = settled<SCALE_FORMAT>(scale_of<TENSOR, FORMAT>(amax_bits, 0.0f, 0.0f));
    const Divisor divisor = prepared<TENSOR>(scale);
    if (first == 0) store_scale<SCALE_FORMAT>(scales, 0, scale);

#pragma unroll 1
    while (next > chunks_end) {
        next -= step;
        store(next, false, encode_octet<INPUT, FORMAT, TENSOR>(load(next, false, false), divisor));
    }
#pragma unroll 1
    while (next > passed) {
        next -= CHUNK * step;
#pragma unroll
        for (int v = CHUNK - 1; v >= 0; --v) passing[v] = load(next + v * step, true, false);
#pragma unroll
        for (int v = CHUNK - 1; v >= 0; --v) {
            store(next + v * step, true, encode_octet<INPUT, FORMAT, TENSOR>(passing[v], divisor));
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
        store_octet_part(data + octets * 8, encode_octet<INPUT, FORMAT, TENSOR>(last, divisor), tail);
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
