// What the headers of cuda_src/ptx have of Hopper, for the emulation: mbarriers, named barriers, TMA, wgmma and matrices.
// Everything is done when it is asked for. A kernel that reads too early, waits for nobody or counts wrong is found; one
// that frees a stage before its products have read it is not, nor one whose order is only that of this machine's threads.
//
// Addresses in shared memory are 32-bit numbers: of dynamic memory its bytes from 0 on, of variables behind STATICS.
#pragma once

constexpr unsigned STATICS = 1u << 30;
static char emulated_anchor;
DEVICE unsigned shared_address(const void* p) {
    const long long at = static_cast<const char*>(p) - reinterpret_cast<const char*>(emulated_shared());
    if (at >= 0 && at < 1 << 18) return static_cast<unsigned>(at);
    return STATICS + static_cast<unsigned>(static_cast<const char*>(p) - &emulated_anchor);
}
DEVICE char* emulated_place(unsigned address) {
    if (address < 1 << 18) return reinterpret_cast<char*>(emulated_shared()) + address;
    return &emulated_anchor + static_cast<int>(address - STATICS);
}
// What other threads did before is ordered before what this one does now.
DEVICE void emulated_ordered() {
    emulation_tx_barrier_open(0);
    emulation_tx_barrier_wait();
}

// ---- mbarriers, which the engine does not look into

struct EmulatedBarrier {
    short arrivals, left;
    int bytes : 31;
    unsigned phase : 1;
};
#define UNCHECKED __attribute__((noinline, no_sanitize("kernel-address", "undefined")))
UNCHECKED static void emulated_init(EmulatedBarrier* b, int arrivals) { *b = {(short)arrivals, (short)arrivals, 0, 0}; }
UNCHECKED static void emulated_count(EmulatedBarrier* b, int arrivals, int bytes) {
    b->left -= (short)arrivals;
    b->bytes += bytes;
    if (b->left < 0) emulation_trap("more arrive at an mbarrier than it awaits");
    if (b->left == 0 && b->bytes == 0) {
        b->left = b->arrivals;
        b->phase ^= 1;
    }
}
UNCHECKED static bool emulated_passed(const EmulatedBarrier* b, unsigned parity) { return b->phase != parity; }
DEVICE EmulatedBarrier* barrier_at(unsigned address) { return reinterpret_cast<EmulatedBarrier*>(emulated_place(address)); }
DEVICE unsigned cluster_address(unsigned address, unsigned) { return address; }
DEVICE void remote_arrive(unsigned barrier) { emulated_count(barrier_at(barrier), 1, 0); }
DEVICE void barrier_init(unsigned barrier, int arrivals) { emulated_init(barrier_at(barrier), arrivals); }
DEVICE void barrier_init_fence() {}
DEVICE void barrier_expect(unsigned barrier, int bytes) { emulated_count(barrier_at(barrier), 1, bytes); }
DEVICE void barrier_arrive(unsigned barrier) { emulated_count(barrier_at(barrier), 1, 0); }
DEVICE bool barrier_passed(unsigned barrier, unsigned parity) { return emulated_passed(barrier_at(barrier), parity); }
DEVICE void barrier_wait(unsigned barrier, unsigned parity) {
    while (!barrier_passed(barrier, parity)) emulation_yield();
    emulated_ordered();
}

// ---- named barriers, of 128 or 256 threads

static int emulated_arrived[16], emulated_rounds[16];
UNCHECKED static int emulated_name(int barrier, int threads) {
    const int round = emulated_rounds[barrier];
    if (++emulated_arrived[barrier] == threads) {
        emulated_arrived[barrier] = 0;
        ++emulated_rounds[barrier];
    }
    return round;
}
UNCHECKED static bool emulated_same_round(int barrier, int round) { return emulated_rounds[barrier] == round; }
DEVICE void threads_arrive(int barrier, int threads) { emulated_name(barrier, threads); }
DEVICE void threads_sync(int barrier, int threads) {
    const int round = emulated_name(barrier, threads);
    while (emulated_same_round(barrier, round)) emulation_yield();
    emulated_ordered();
}
template <int COUNT>
DEVICE void registers_give() {}
template <int COUNT>
DEVICE void registers_take() {}

// ---- TMA: a map is what tests write into it

struct alignas(64) TensorMap {
    long long memory, rows, columns, stride, box_rows, box_columns, item, unused[9];  // columns in bytes; words are not swizzled
};
constexpr word64 EVICT_NORMAL = 0, EVICT_FIRST = 1;
// Of the byte at an address in rows of so many bytes: where it is swizzled to.
DEVICE unsigned emulated_swizzle(unsigned address, int row_bytes) {
    return address ^ (address >> 7 & (row_bytes / 16 - 1)) << 4;
}
DEVICE bool elected() { return emulation_thread()->lane == 0; }
DEVICE void map_prefetch(const TensorMap*) {}
DEVICE void tile_prefetch(const TensorMap*, int, int) {}
UNCHECKED static void tile_load(unsigned to, const TensorMap* map, int column, int row, unsigned barrier, word64 = 0) {
    column *= (int)map->item;
    for (int i = 0; i < map->box_rows; ++i)
        for (int j = 0; j < map->box_columns; ++j) {
            const bool inside = row + i < map->rows && column + j < map->columns;
            const unsigned at = to + i * (unsigned)map->box_columns + j;
            *emulated_place(map->item == 1 ? emulated_swizzle(at, (int)map->box_columns) : at) =
                inside ? reinterpret_cast<const char*>(map->memory)[(row + i) * map->stride + column + j] : 0;
        }
    emulated_count(barrier_at(barrier), 0, -(int)(map->box_rows * map->box_columns));
}
DEVICE void tile_load_shared(unsigned, const TensorMap*, int, int, unsigned, int, word64 = 0) {
    emulation_trap("clusters are not emulated");
}
// The threads' staged bytes are read as the engine's hooks see any read.
DEVICE void tile_store(const TensorMap* map, unsigned from, int column, int row) {
    for (int i = 0; i < map->box_rows && row + i < map->rows; ++i)
        for (int j = 0; j < map->box_columns && column + j < map->columns; ++j) {
            const unsigned at = from + i * (unsigned)map->box_columns + j;
            reinterpret_cast<char*>(map->memory)[(row + i) * map->stride + column + j] =
                *emulated_place(emulated_swizzle(at, (int)map->box_columns));
        }
}
DEVICE void stores_commit() {}
template <int PENDING>
DEVICE void stores_read() {}
DEVICE void writes_fence() {}
DEVICE void word_copy(unsigned to, const void* from) { __builtin_memcpy(emulated_place(to), from, 4); }
DEVICE void words_arrive(unsigned barrier) { barrier_arrive(barrier); }
DEVICE void words_wait() {}

// ---- wgmma: each thread sums its own results, in float64 over 32 columns

DEVICE word64 tile_descriptor(unsigned address) { return address >> 4 & 0x3FFF; }
DEVICE word64 descriptor_of(unsigned low) { return low; }
DEVICE void product_begin() {}
DEVICE void product_commit() {}
template <int PENDING>
DEVICE void product_wait() {}
template <int COUNT>
DEVICE void registers_fence(float (&)[COUNT]) {}
template <int format>
UNCHECKED static double emulated_code(unsigned address) {
    const int code = (unsigned char)*emulated_place(emulated_swizzle(address, 128)), fraction = format == E4M3FN ? 3 : 2;
    const int exponent = (code & 0x7F) >> fraction, bias = format == E4M3FN ? 7 : 15, rest = code & ((1 << fraction) - 1);
    const double size = exponent ? __builtin_ldexp((1 << fraction) + rest, exponent - bias - fraction)
                                 : __builtin_ldexp(rest, 1 - bias - fraction);
    return code & 0x80 ? -size : size;
}
template <int a_format, int b_format, int sums>
UNCHECKED static void product_issue(float (&d)[sums], word64 a, word64 b, int keep) {
    const int thread = (int)(threadIdx.x % 128), row = thread / 32 * 16 + thread % 32 / 4;
    double of_a[2][32];
    for (int i = 0; i < 64; ++i)
        of_a[i / 32][i % 32] = emulated_code<a_format>((unsigned)(a & 0x3FFF) * 16 + (row + i / 32 * 8) * 128 + i % 32);
    for (int i = 0; i < sums; i += 4)
        for (int j = 0; j < 2; ++j) {
            double sum[2] = {};
            for (int k = 0; k < 32; ++k) {
                const int channel = i / 4 * 8 + thread % 4 * 2 + j;
                const double of_b = emulated_code<b_format>((unsigned)(b & 0x3FFF) * 16 + channel * 128 + k);
                for (int half = 0; half < 2; ++half) sum[half] += of_a[half][k] * of_b;
            }
            for (int half = 0; half < 2; ++half)
                d[i + 2 * half + j] = (float)((keep ? d[i + 2 * half + j] : 0.0f) + sum[half]);
        }
}

// ---- matrices

// What is read may be of columns that a result does not have, where nothing was loaded.
UNCHECKED static unsigned emulated_word(const char* at) { return *reinterpret_cast<const unsigned*>(at); }
DEVICE char* matrices_place(unsigned place, int matrix) {
    const int lane = emulation_thread()->lane;
    return emulated_place(__shfl_sync(0xffffffffu, place, matrix * 8 + lane / 4) + lane % 4 * 4);
}
DEVICE void matrices_load(unsigned place, unsigned& a, unsigned& b, unsigned& c, unsigned& d) {
    unsigned* const pairs[4] = {&a, &b, &c, &d};
    for (int i = 0; i < 4; ++i) *pairs[i] = emulated_word(matrices_place(place, i));
}
DEVICE void matrices_store(unsigned place, unsigned a, unsigned b, unsigned c, unsigned d) {
    const unsigned pairs[4] = {a, b, c, d};
    for (int i = 0; i < 4; ++i) __builtin_memcpy(matrices_place(place, i), &pairs[i], 4);
}
// To bfloat16, of numbers alone.
template <int output>
DEVICE unsigned emulated_round_pair(float lo, float hi) {
    static_assert(output == BFLOAT16, "results are bfloat16");
    const auto rounded = [](float x) { return (bits_of(x) + 0x7FFF + (bits_of(x) >> 16 & 1)) >> 16; };
    return rounded(hi) << 16 | rounded(lo);
}
