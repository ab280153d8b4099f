// The interface between the engine (engine.cpp), Python (abi.py) and the functions that kernels call (words.h).
#pragma once
#include <stddef.h>
#include <stdint.h>

struct EmulatedIndex {
    unsigned x, y, z;
};

// The indices of a thread of a kernel.
struct EmulatedThread {
    EmulatedIndex thread, block, block_size, grid_size;
    unsigned lane, warp_size;
};

// What a collective operation of a warp does with the values of its lanes.
enum EmulatedCollective { EMULATED_EXCHANGE, EMULATED_BALLOT, EMULATED_SYNC };
enum EmulatedVote { EMULATED_OR, EMULATED_AND, EMULATED_COUNT };

// An array that a launch may access; writable is 0 for an input.
struct EmulatedArray {
    uintptr_t address;
    uint64_t bytes;
    int32_t writable;
};

// The order in which threads run, and when asynchronous operations happen; `seed` is that of the random choices.
enum EmulatedOrder { EMULATED_NEXT, EMULATED_FIRST, EMULATED_LAST, EMULATED_GROUPS, EMULATED_ANY };
enum EmulatedLanding { EMULATED_AT_ONCE, EMULATED_LATE, EMULATED_SOMETIME };
struct EmulatedSchedule {
    int32_t order, landing;
    uint32_t seed;
};

struct EmulatedLaunch {
    void (*call)(void **arguments);
    void **arguments;
    uint32_t grid[3], block[3];
    uint32_t shared_bytes, warp;
    EmulatedSchedule schedule;
    int32_t together;  // blocks that run together: 1; a cluster, which divides the grid; 0: a cooperative grid
    int32_t flush_subnormals;
    int32_t reads_need_fences;  // TMA may write what threads have read only after a fence.proxy.async
    const EmulatedArray *arrays;
    int32_t array_count;  // 0: global memory is not checked
    char *report;
    int32_t report_bytes;
    uintptr_t site;  // set by an error: its address in the kernel
};

extern "C" {
// Returns 0, or 1 and fills the report.
int emulation_launch(EmulatedLaunch *launch);

__attribute__((const)) const EmulatedThread *emulation_thread();
void *emulation_dynamic_shared();
unsigned emulation_barrier(int predicate, EmulatedVote vote);
// Returns the value of lane `source`, or for a ballot the lanes of `mask` with a nonzero value.
uint64_t emulation_collective(EmulatedCollective kind, uint64_t mask, uint64_t value, unsigned source);
// Lets other threads run: for loops that poll memory.
void emulation_yield();
// The functions of cuda_src/ptx/cluster.cuh: the blocks that run together are a cluster.
void emulation_tx_barrier_open(const void *barrier, int bytes);
void emulation_cluster_arrive();
void emulation_cluster_wait();
void emulation_dsmem_store(const void *place, unsigned x, const void *barrier, unsigned rank);
void emulation_tx_barrier_wait(const void *barrier);
// The functions of hopper.h. Addresses have 32 bits, as in PTX; the top 8 bits are 0, or another block's rank + 1.
unsigned emulation_shared_address(const void *place);
char *emulation_shared_place(unsigned address);
unsigned emulation_loose_word(const char *place);  // uninitialized memory is allowed
void emulation_mbarrier_init(unsigned barrier, int arrivals);
void emulation_mbarrier_fence();
void emulation_mbarrier_arrive(unsigned barrier, int bytes);
bool emulation_mbarrier_passed(unsigned barrier, unsigned parity);
void emulation_mbarrier_wait(unsigned barrier, unsigned parity);
void emulation_named_barrier(int barrier, int threads, int waits);
void emulation_proxy_fence();
void emulation_tile_load(unsigned to, const void *map, int column, int row, unsigned barrier, int blocks);
void emulation_tile_store(const void *map, unsigned from, int column, int row);
void emulation_stores_commit();
void emulation_stores_read(int pending);
void emulation_word_copy(unsigned to, const void *from);
void emulation_words_arrive(unsigned barrier);
void emulation_words_wait();
void emulation_remote_store(unsigned to, const void *values, int bytes, unsigned barrier);
void emulation_products_fence();
// The content of sums while a product into them is under way: a NaN, which propagates through arithmetic.
constexpr uint32_t EMULATED_POISONED_SUM = 0x7FCBADAD;
// d[64, 2 * sums] = (keep ? d : 0) + a * b^T over 32 columns of the tiles at a and b; a format is 1 for e5m2, else 0.
void emulation_product(float *d, int sums, unsigned a, unsigned b, int keep, int a_format, int b_format);
// The same product with a in registers: w are those of this thread, rows all 32 columns of its two rows.
void emulation_product_of_rows(float *d, int sums, const unsigned *w, const unsigned *rows, unsigned b, int keep, int a_format, int b_format);
void emulation_products_commit();
void emulation_products_wait(int pending);
// Checks an atomic operation on `bytes` bytes at `address`, before it happens.
void emulation_atomic(const void *address, size_t bytes);
[[noreturn]] void emulation_trap(const char *why);
}
