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

struct EmulatedLaunch {
    void (*call)(void **arguments);
    void **arguments;
    uint32_t grid[3], block[3];
    uint32_t shared_bytes, warp;
    int32_t together;  // blocks that run at once: 1, a cluster's, which divide the grid, or 0 for all of a cooperative grid
    int32_t flush_subnormals;
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
void emulation_tx_barrier_open(int bytes);
void emulation_cluster_arrive();
void emulation_cluster_wait();
void emulation_dsmem_store(unsigned *place, unsigned x, unsigned rank);
void emulation_tx_barrier_wait();
// Before an atomic operation on `bytes` at `address`.
void emulation_atomic(const void *address, size_t bytes);
[[noreturn]] void emulation_trap(const char *why);
}
