// What the engine (engine.cpp) and the words of the kernels (words.h) agree on.
#pragma once
#include <stddef.h>
#include <stdint.h>

struct EmulatedIndex {
    unsigned x, y, z;
};

// What a thread of a kernel knows of itself.
struct EmulatedThread {
    EmulatedIndex thread, block, block_size, grid_size;
    unsigned lane, warp_size;
};

// What a collective of a warp does with the values of its lanes.
enum EmulatedCollective { EMULATED_EXCHANGE, EMULATED_BALLOT, EMULATED_SYNC };
enum EmulatedVote { EMULATED_OR, EMULATED_AND, EMULATED_COUNT };

// An array that a launch may touch; one that it only reads has writable 0.
struct EmulatedArray {
    uintptr_t address;
    uint64_t bytes;
    int32_t writable;
};

// The order in which threads run, and when what is asynchronous happens; `seed` draws what is random.
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
    int32_t together;  // blocks that run at once: 1, a cluster's, which divide the grid, or 0 for all of a cooperative grid
    int32_t flush_subnormals;
    int32_t reads_need_fences;  // fence.proxy.async after threads' reads, before TMA writes there
    const EmulatedArray *arrays;
    int32_t array_count;  // 0: global memory is not checked
    char *report;
    int32_t report_bytes;
    uintptr_t site;  // set by an error: the address in the kernel that it was found at
};

extern "C" {
// 0, or 1 with a report.
int emulation_launch(EmulatedLaunch *launch);

__attribute__((const)) const EmulatedThread *emulation_thread();
void *emulation_dynamic_shared();
unsigned emulation_barrier(int predicate, EmulatedVote vote);
// The lane `source`'s value, or for a ballot the lanes of `mask` whose value is not 0.
uint64_t emulation_collective(EmulatedCollective kind, uint64_t mask, uint64_t value, unsigned source);
// Lets other threads run: for loops that poll memory.
void emulation_yield();
// The words of cuda_src/ptx/cluster.cuh: the blocks that run together are a cluster.
void emulation_tx_barrier_open(const void *barrier, int bytes);
void emulation_cluster_arrive();
void emulation_cluster_wait();
void emulation_dsmem_store(const void *place, unsigned x, const void *barrier, unsigned rank);
void emulation_tx_barrier_wait(const void *barrier);
// The words of hopper.h. Addresses are numbers of 32 bits, as in PTX; of another block they have its rank + 1 on top.
unsigned emulation_shared_address(const void *place);
char *emulation_shared_place(unsigned address);
unsigned emulation_loose_word(const char *place);  // which may be one that nobody wrote
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
// What registers hold into which a product is under way: a NaN, which arithmetic keeps.
constexpr uint32_t EMULATED_POISONED_SUM = 0x7FCBADAD;
// d[64, 2 * sums] = (keep ? d : 0) + a * b^T of 32 columns of tiles at these addresses; formats: whether they are e5m2.
void emulation_product(float *d, int sums, unsigned a, unsigned b, int keep, int a_format, int b_format);
// The same with a in registers, w of this thread; rows: of its two rows all 32 columns.
void emulation_product_of_rows(float *d, int sums, const unsigned *w, const unsigned *rows, unsigned b, int keep, int a_format, int b_format);
void emulation_products_commit();
void emulation_products_wait(int pending);
// Before an atomic operation on `bytes` at `address`.
void emulation_atomic(const void *address, size_t bytes);
[[noreturn]] void emulation_trap(const char *why);
}
