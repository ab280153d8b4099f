// Replaces Hopper's PTX in the headers of cuda_src/ptx: mbarriers, named barriers, TMA, wgmma and matrices. The engine
// implements them (mbarriers.h, copies.h, tensor_cores.h); addresses in shared memory are its 32-bit numbers.
#pragma once

DEVICE unsigned shared_address(const void* p) { return emulation_shared_address(p); }

// ---- mbarriers

DEVICE unsigned cluster_address(unsigned address, unsigned rank) { return address | (rank + 1) << 24; }
DEVICE void barrier_init(unsigned barrier, int arrivals) { emulation_mbarrier_init(barrier, arrivals); }
DEVICE void barrier_init_fence() { emulation_mbarrier_fence(); }
DEVICE void barrier_expect(unsigned barrier, int bytes) { emulation_mbarrier_arrive(barrier, bytes); }
DEVICE void barrier_arrive(unsigned barrier) { emulation_mbarrier_arrive(barrier, 0); }
DEVICE void remote_arrive(unsigned barrier) { emulation_mbarrier_arrive(barrier, 0); }
DEVICE bool barrier_passed(unsigned barrier, unsigned parity) { return emulation_mbarrier_passed(barrier, parity); }
DEVICE void barrier_wait(unsigned barrier, unsigned parity) { emulation_mbarrier_wait(barrier, parity); }

// ---- named barriers, and the exchange of registers, which the emulation ignores

DEVICE void threads_arrive(int barrier, int threads) { emulation_named_barrier(barrier, threads, 0); }
DEVICE void threads_sync(int barrier, int threads) { emulation_named_barrier(barrier, threads, 1); }
template <int COUNT>
DEVICE void setmaxnreg_dec() {}
template <int COUNT>
DEVICE void setmaxnreg_inc() {}

// ---- TMA: tests write the tensor maps (hopper.py)

struct alignas(64) TensorMap {
    long long memory, rows, columns, stride, box_rows, box_columns, item, swizzled, unused[8];  // columns in bytes
};
constexpr word64 EVICT_NORMAL = 0, EVICT_FIRST = 1, EVICT_LAST = 2;
DEVICE bool elected() { return emulation_thread()->lane == 0; }
DEVICE void map_prefetch(const TensorMap*) {}
DEVICE void tile_prefetch(const TensorMap*, int, int) {}
DEVICE void tile_load(unsigned to, const TensorMap* map, int column, int row, unsigned barrier, word64 = 0) {
    emulation_tile_load(to, map, column, row, barrier, 0);
}
DEVICE void tile_load_once(unsigned to, const TensorMap* map, int column, int row, unsigned barrier) {
    tile_load(to, map, column, row, barrier);
}
DEVICE void tile_load_shared(unsigned to, const TensorMap* map, int column, int row, unsigned barrier, int blocks,
                             word64 = 0) {
    emulation_tile_load(to, map, column, row, barrier, blocks);
}
DEVICE void tile_store(const TensorMap* map, unsigned from, int column, int row) {
    emulation_tile_store(map, from, column, row);
}
DEVICE void stores_commit() { emulation_stores_commit(); }
template <int PENDING>
DEVICE void stores_read() {
    emulation_stores_read(PENDING);
}
DEVICE void accesses_fence() { emulation_proxy_fence(); }
DEVICE void cp_async_word(unsigned to, const void* from) { emulation_cp_async_word(to, from); }
DEVICE void cp_async_arrive(unsigned barrier) { emulation_cp_async_arrive(barrier); }
DEVICE void cp_async_wait_all() { emulation_cp_async_wait_all(); }
template <class Floats>
DEVICE void remote_store(unsigned to, Floats values, unsigned barrier) {
    emulation_remote_store(to, &values, sizeof values, barrier);
}

// ---- wgmma

DEVICE word64 tile_descriptor(unsigned address) { return address >> 4 & 0x3FFF; }
DEVICE word64 descriptor_of(unsigned low) { return low; }
DEVICE void wgmma_fence() { emulation_products_fence(); }
DEVICE void wgmma_commit() { emulation_products_commit(); }
template <int PENDING>
DEVICE void wgmma_wait() {
    emulation_products_wait(PENDING);
}
template <int COUNT>
DEVICE void registers_fence(float (&)[COUNT]) {}
template <int ROWS, int COUNT>
DEVICE void registers_fence(unsigned (&)[ROWS][COUNT]) {}
template <int a_format, int b_format, int sums>
DEVICE void wgmma_issue(float (&d)[sums], word64 a, word64 b, int keep) {
    emulation_product(d, sums, (unsigned)(a & 0x3FFF) * 16, (unsigned)(b & 0x3FFF) * 16, keep, a_format == E5M2,
                      b_format == E5M2);
}

// With 64 rows of w in registers: each four neighbouring lanes share two rows; a register holds four columns of a row.
template <int w_format, int a_format, int sums>
DEVICE void wgmma_issue(float (&d)[sums], const unsigned (&w)[4], word64 a, int keep) {
    unsigned rows[2][8];
    for (int i = 0; i < 8; ++i)
        for (int half = 0; half < 2; ++half)
            rows[half][i] = __shfl_sync(0xffffffffu, w[i / 4 * 2 + half], emulation_thread()->lane / 4 * 4 + i % 4);
    emulation_product_of_rows(d, sums, w, &rows[0][0], (unsigned)(a & 0x3FFF) * 16, keep, w_format == E5M2,
                              a_format == E5M2);
}

// ---- shared memory by 32-bit address, and matrices

// ld.shared and st.shared of one number or of several adjacent ones.
template <class... T>
DEVICE void shared_load(unsigned address, T&... values) {
    const char* from = emulation_shared_place(address);
    ((__builtin_memcpy(&values, from, sizeof values), from += sizeof values), ...);
}
// ld.shared.u8, into a register of 16 bits.
DEVICE void shared_load_byte(unsigned address, unsigned short& value) {
    byte code;
    __builtin_memcpy(&code, emulation_shared_place(address), 1);
    value = code;
}
template <class... T>
DEVICE void shared_store(unsigned address, T... values) {
    char* to = emulation_shared_place(address);
    ((__builtin_memcpy(to, &values, sizeof values), to += sizeof values), ...);
}

// Loads may read uninitialized memory: columns that the result does not have.
DEVICE char* matrices_place(unsigned place, int matrix) {
    const int lane = emulation_thread()->lane;
    return emulation_shared_place(__shfl_sync(0xffffffffu, place, matrix * 8 + lane / 4) + lane % 4 * 4);
}
DEVICE void matrices_load(unsigned place, unsigned& a, unsigned& b, unsigned& c, unsigned& d) {
    unsigned* const pairs[4] = {&a, &b, &c, &d};
    for (int i = 0; i < 4; ++i) *pairs[i] = emulation_loose_word(matrices_place(place, i));
}
DEVICE void matrices_store(unsigned place, unsigned a, unsigned b, unsigned c, unsigned d) {
    const unsigned pairs[4] = {a, b, c, d};
    for (int i = 0; i < 4; ++i) __builtin_memcpy(matrices_place(place, i), &pairs[i], 4);
}
// Transposes an 8x8 matrix; a lane holds the columns 2 * (lane % 4) + {0, 1} of row lane / 4.
DEVICE unsigned warp_transpose(unsigned pair) {
    const int row = emulation_thread()->lane / 4, column = emulation_thread()->lane % 4 * 2;
    unsigned both = 0;
    for (int i = 0; i < 2; ++i) {
        const unsigned found = __shfl_sync(0xffffffffu, pair, (column + i) * 4 + row / 2);
        both |= (found >> row % 2 * 16 & 0xFFFF) << 16 * i;
    }
    return both;
}
// Rounds two numbers to 16 bits each.
template <int output>
DEVICE unsigned emulated_round_pair(float lo, float hi) {
    const float both[] = {lo, hi};
    for (const float x : both)
        if ((bits_of(x) & 0x7FFFFFFF) == EMULATED_POISONED_SUM)
            emulation_trap("a result is made of sums into which a product is under way");
    const auto rounded = [](float x) -> unsigned { return output == FLOAT16 ? float_to_half(x) : float_to_bf16(x); };
    return rounded(hi) << 16 | rounded(lo);
}
