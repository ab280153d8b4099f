// One scale for a whole matrix, in one launch: scale = max(max |x| / MAX, 2**-126), data = encode(x * (1 / scale)).
//
// A resident grid finds the largest size; its blocks tell each other theirs, then each encodes what it read. Octets are dealt
// to the threads of the grid in turns. Of the last turns a thread keeps VECTORS in registers and up to SHARED_OCTETS in
// shared memory, read first and past the caches; what comes before them is read once more, backwards, while the
// second cache still holds the latest of it.
//
// Blocks meet through flags, one a block: a 64-bit word of the launch's epoch and the block's largest size, so nothing
// else has to be ordered. A block finds the epoch in its own flag of the launch before, so the words need no reset
// between launches, no argument that a graph would bake in, and no memory but the module's. What makes this right:
//   - every launch of more than one block has the same grid, one block a multiprocessor, and asks for more than half of a
//     multiprocessor's shared memory: no multiprocessor holds two blocks, whichever streams or graphs they come from;
//   - so a block of launch n + 1 begins only where a block of launch n has ended, that is after all flags n were
//     written; and it passes its own meeting only when all blocks n have ended. Two sets of flags, used by turns, are enough;
//   - the launch is cooperative, so two grids cannot each hold part of the device and wait for the rest.
//
// Constants: INPUT FORMAT SCALE_FORMAT THREADS VECTORS SHARED_OCTETS ALIGNMENT, and FLAT: rows follow each other without
// gaps, in x and in data, so that the matrix is one long row and no division is needed to find an octet.
// The caller owes: addresses and strides of rows are multiples of ALIGNMENT; a grid of one block, or the cooperative
// grid above with at most THREADS blocks and THREADS * SHARED_OCTETS octets of dynamic shared memory.
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

// Where an octet lies, and how many elements it has.
struct Place {
    long long row, col;
    int count;
};

KERNEL(THREADS)
quantize_tensor(QUANTIZE_PARAMETERS) {
    DYNAMIC_SHARED(shared);
    constexpr int ITEM = ITEM_BYTES[INPUT], PLANES = Octet<INPUT>::WORDS / 4, CHUNK = VECTORS / 2;
    const long long length = FLAT ? rows * cols : cols;
    const long long row_octets = (length + 7) / 8, octets = FLAT ? row_octets : rows * row_octets;
    const long long step = static_cast<long long>(grid_x()) * THREADS;
    const long long first = static_cast<long long>(block_x()) * THREADS + thread_x();
    const int turns = static_cast<int>((octets + step - 1) / step);
    const int in_registers = turns < VECTORS ? turns : VECTORS;
    const int in_shared = turns - in_registers < SHARED_OCTETS ? turns - in_registers : SHARED_OCTETS;
    const int again = turns - in_registers - in_shared;

    unsigned epoch = 0;
    if (thread_x() == 0 && grid_x() > 1) {
        const unsigned even = static_cast<unsigned>(load_relaxed(&quantize_tensor_flags[0][block_x()]) >> 32);
        const unsigned odd = static_cast<unsigned>(load_relaxed(&quantize_tensor_flags[1][block_x()]) >> 32);
        epoch = (static_cast<int>(odd - even) > 0 ? odd : even) + 1;
    }

    auto place_of = [&](int turn) -> Place {
        const long long octet = first + turn * step;
        if (octet >= octets) return {0, 0, 0};
        const long long row = FLAT                       ? 0
                              : octets < 0x100000000ll ? static_cast<unsigned>(octet) / static_cast<unsigned>(row_octets)
                                                       : octet / row_octets;
        const long long col = (octet - row * row_octets) * 8;
        return {row, col, length - col < 8 ? static_cast<int>(length - col) : 8};
    };
    auto load = [&](int turn, bool kept) {
        const Place at = place_of(turn);
        const byte* const p = x + (at.row * x_stride + at.col) * ITEM;
        if (at.count == 8) return kept ? load_octet<INPUT, ALIGNMENT, true>(p) : load_octet<INPUT, ALIGNMENT>(p);
        return at.count == 0 ? empty_octet<INPUT>() : load_octet_part<INPUT>(p, at.count);
    };
    auto store = [&](int turn, Vector8 codes) {
        const Place at = place_of(turn);
        byte* const p = data + at.row * data_stride + at.col;
        if (at.count == 8) store_octet<ALIGNMENT, true>(p, codes);
        if (at.count > 0 && at.count < 8) store_octet_part(p, codes, at.count);
    };
    auto shared_at = [&](int turn, int plane) { return shared + ((turn * PLANES + plane) * THREADS + thread_x()) * 16; };

    grid_dependency_launch();
    grid_dependency_wait();

    Largest<INPUT> largest;
    Octet<INPUT> kept[VECTORS], passing[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        if (v < in_registers) kept[v] = load(again + in_shared + v, true);
    }
    for (int turn = 0; turn < in_shared; turn += CHUNK) {
#pragma unroll
        for (int v = 0; v < CHUNK; ++v) {
            if (turn + v < in_shared) passing[v] = load(again + turn + v, true);
        }
#pragma unroll
        for (int v = 0; v < CHUNK; ++v) {
            if (turn + v >= in_shared) continue;
            largest.see(passing[v]);
#pragma unroll
            for (int plane = 0; plane < PLANES; ++plane) {
                const unsigned* const w = passing[v].words + 4 * plane;
                store16(shared_at(turn + v, plane), {w[0], w[1], w[2], w[3]});
            }
        }
    }
    for (int turn = 0; turn < again; turn += VECTORS) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (turn + v < again) passing[v] = load(turn + v, false);
        }
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (turn + v < again) largest.see(passing[v]);
        }
    }
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        if (v < in_registers) largest.see(kept[v]);
    }

    const unsigned amax_bits = grid_max(largest.bits(), epoch);
    const float scale = settled<SCALE_FORMAT>(scale_of<TENSOR, FORMAT>(amax_bits, 0.0f, 0.0f));
    const Divisor divisor = prepared<TENSOR>(scale);
    if (first == 0) store_scale<SCALE_FORMAT>(scales, 0, scale);

    for (int turn = again - 1; turn >= 0; turn -= VECTORS) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (turn >= v) passing[v] = load(turn - v, false);
        }
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (turn >= v) store(turn - v, encode_octet<INPUT, FORMAT, TENSOR>(passing[v], divisor));
        }
    }
    for (int turn = in_shared - 1; turn >= 0; --turn) {
        Octet<INPUT> octet;
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane) {
            const Vector16 v = load16(shared_at(turn, plane));
            unsigned* const w = octet.words + 4 * plane;
            w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
        }
        store(again + turn, encode_octet<INPUT, FORMAT, TENSOR>(octet, divisor));
    }
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        if (v < in_registers) store(again + in_shared + v, encode_octet<INPUT, FORMAT, TENSOR>(kept[v], divisor));
    }

    const long long padding_octets = (cols + 7) / 8;
    for (long long i = first; i < (rows_padded - rows) * padding_octets; i += step) {
        const long long row = rows + i / padding_octets, col = i % padding_octets * 8;
        byte* const p = data + row * data_stride + col;
        if (cols - col >= 8) {
            store_octet<ALIGNMENT>(p, {0, 0});
        } else {
            store_octet_part(p, {0, 0}, static_cast<int>(cols - col));
        }
    }
}
