// One scale for a whole matrix, in one launch: scale = max(max |x| / MAX, 2**-126), data = encode(x * (1 / scale)).
//
// A resident grid finds the largest size; its blocks tell each other theirs, then each encodes what it read. Octets are dealt
// to the blocks in turn. Of its octets a thread keeps the last VECTORS in registers and the SHARED_OCTETS before
// those in shared memory; the ones before are read again, backwards, while the second cache still holds the latest.
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
// Constants: INPUT FORMAT SCALE_FORMAT THREADS VECTORS SHARED_OCTETS ALIGNMENT.
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

KERNEL(THREADS)
quantize_tensor(QUANTIZE_PARAMETERS) {
    DYNAMIC_SHARED(shared);
    constexpr int ITEM = ITEM_BYTES[INPUT], PLANES = Octet<INPUT>::WORDS / 4;
    // Rows without gaps between them are one long row, whose octets need no division to find.
    const bool flat = rows <= 1 || (x_stride == cols && data_stride == cols);
    const long long length = flat ? rows * cols : cols;
    const long long row_octets = (length + 7) / 8, octets = flat ? row_octets : rows * row_octets;
    const long long step = static_cast<long long>(grid_x()) * THREADS;
    const long long first = static_cast<long long>(block_x()) * THREADS + thread_x();
    const long long turns = (octets + step - 1) / step;
    const long long unkept = turns - VECTORS - SHARED_OCTETS > 0 ? turns - VECTORS - SHARED_OCTETS : 0;
    const int in_shared = static_cast<int>(turns - unkept > VECTORS ? turns - unkept - VECTORS : 0);

    unsigned epoch = 0;
    if (thread_x() == 0 && grid_x() > 1) {
        const unsigned even = static_cast<unsigned>(load_relaxed(&quantize_tensor_flags[0][block_x()]) >> 32);
        const unsigned odd = static_cast<unsigned>(load_relaxed(&quantize_tensor_flags[1][block_x()]) >> 32);
        epoch = (static_cast<int>(odd - even) > 0 ? odd : even) + 1;
    }

    struct Place {
        long long row, col;
        int count;
    };
    auto place_of = [&](long long turn) -> Place {
        const long long octet = first + turn * step;
        if (octet >= octets) return {0, 0, 0};
        const long long row = flat                       ? 0
                              : octets < 0x100000000ll ? static_cast<unsigned>(octet) / static_cast<unsigned>(row_octets)
                                                       : octet / row_octets;
        const long long col = (octet - row * row_octets) * 8;
        return {row, col, length - col < 8 ? static_cast<int>(length - col) : 8};
    };
    auto load = [&](long long turn) {
        const Place at = place_of(turn);
        const byte* const p = x + (at.row * x_stride + at.col) * ITEM;
        if (at.count == 8) return load_octet<INPUT, ALIGNMENT>(p);
        return at.count == 0 ? empty_octet<INPUT>() : load_octet_part<INPUT>(p, at.count);
    };
    auto store = [&](long long turn, Vector8 codes) {
        const Place at = place_of(turn);
        byte* const p = data + at.row * data_stride + at.col;
        if (at.count == 8) store_octet<ALIGNMENT>(p, codes);
        if (at.count > 0 && at.count < 8) store_octet_part(p, codes, at.count);
    };
    auto shared_at = [&](int turn, int plane) { return shared + ((turn * PLANES + plane) * THREADS + thread_x()) * 16; };

    grid_dependency_launch();
    grid_dependency_wait();

    float amax = 0.0f;
    Octet<INPUT> kept[VECTORS];
    for (long long turn = 0; turn < unkept; turn += VECTORS) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) kept[v] = turn + v < unkept ? load(turn + v) : empty_octet<INPUT>();
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) amax = octet_amax(kept[v], amax);
    }
    for (int turn = 0; turn < in_shared; turn += VECTORS) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) kept[v] = turn + v < in_shared ? load(unkept + turn + v) : empty_octet<INPUT>();
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            amax = octet_amax(kept[v], amax);
#pragma unroll
            for (int plane = 0; plane < PLANES; ++plane) {
                const unsigned* const w = kept[v].words + 4 * plane;
                if (turn + v < in_shared) store16(shared_at(turn + v, plane), {w[0], w[1], w[2], w[3]});
            }
        }
    }
    const long long last = unkept + in_shared;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) kept[v] = load(last + v);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) amax = octet_amax(kept[v], amax);

    const unsigned amax_bits = grid_max(bits_of(amax), epoch);
    const float scale = settled<SCALE_FORMAT>(scale_of<TENSOR, FORMAT>(amax_bits, 0.0f, 0.0f));
    const Divisor divisor = prepared<TENSOR>(scale);
    if (first == 0) store_scale<SCALE_FORMAT>(scales, 0, scale);

#pragma unroll
    for (int v = 0; v < VECTORS; ++v) store(last + v, encode_octet<INPUT, FORMAT, TENSOR>(kept[v], divisor));
    for (int turn = in_shared - 1; turn >= 0; --turn) {
        Octet<INPUT> octet;
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane) {
            const Vector16 v = load16(shared_at(turn, plane));
            unsigned* const w = octet.words + 4 * plane;
            w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
        }
        store(unkept + turn, encode_octet<INPUT, FORMAT, TENSOR>(octet, divisor));
    }
    for (long long turn = unkept - 1; turn >= 0; turn -= VECTORS) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) kept[v] = turn >= v ? load(turn - v) : empty_octet<INPUT>();
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (turn >= v) store(turn - v, encode_octet<INPUT, FORMAT, TENSOR>(kept[v], divisor));
        }
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
