// Copies that bypass registers: TMA, which moves boxes of a two-dimensional tensor (columns first) by a tensor map, and
// cp.async, which loads single words and vectors. Addresses in shared memory are 32-bit numbers.
#pragma once
#include "../platform.cuh"

struct alignas(64) TensorMap {
    char bytes[128];
};

// True in one lane of a warp, by elect.sync, so that the compiler knows that it is a single one. With a test for lane 0
// each TMA copy becomes a loop over lanes whose operands might differ.
DEVICE bool elected() {
    unsigned chosen;
    asm volatile("{\n\t.reg .pred one;\n\telect.sync _|one, 0xffffffff;\n\tselp.u32 %0, 1, 0, one;\n\t}"
                 : "=r"(chosen));
    return chosen;
}
DEVICE void map_prefetch(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
DEVICE void tile_load(unsigned destination, const TensorMap* map, int column, int row, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(destination),
                 "l"(map), "r"(column), "r"(row), "r"(barrier)
                 : "memory");
}
// Multicast: loads the box into each block of the cluster whose bit is set in `blocks`, at the same address, and counts
// it at the same barrier.
DEVICE void tile_load_shared(unsigned destination, const TensorMap* map, int column, int row, unsigned barrier,
                             int blocks) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination),
                 "l"(map), "r"(column), "r"(row), "r"(barrier), "h"((unsigned short)blocks)
                 : "memory");
}
// As the first, with an L2 eviction policy.
constexpr word64 EVICT_NORMAL = 0x1000000000000000ull, EVICT_FIRST = 0x12F0000000000000ull,
                 EVICT_LAST = 0x14F0000000000000ull;
DEVICE void tile_load(unsigned destination, const TensorMap* map, int column, int row, unsigned barrier,
                      word64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination),
                 "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
                 : "memory");
}
// Multicast with an L2 eviction policy.
DEVICE void tile_load_shared(unsigned destination, const TensorMap* map, int column, int row, unsigned barrier,
                             int blocks, word64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
                 ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(destination),
                 "l"(map), "r"(column), "r"(row), "r"(barrier), "h"((unsigned short)blocks), "l"(policy)
                 : "memory");
}
// Prefetches a box into L2.
DEVICE void tile_prefetch(const TensorMap* map, int column, int row) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(column), "r"(row)
                 : "memory");
}
// Loads data that is read once.
DEVICE void tile_load_once(unsigned destination, const TensorMap* map, int column, int row, unsigned barrier) {
    tile_load(destination, map, column, row, barrier, EVICT_FIRST);
}

// ---- stores, in groups of a thread: a source may be overwritten when its group has been read

DEVICE void tile_store(const TensorMap* map, unsigned source, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(source), "r"(column), "r"(row)
                 : "memory");
}
DEVICE void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until the sources of all but the last PENDING groups have been read.
template <int PENDING>
DEVICE void stores_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// ---- cp.async: a thread arrives once at a barrier when all its copies have landed

DEVICE void cp_async_word(unsigned destination, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(destination), "l"(source) : "memory");
}
DEVICE void cp_async_arrive(unsigned barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Orders this thread's accesses to shared memory before those that TMA and the tensor cores make after a barrier: by
// then its stores are visible and its loads complete.
DEVICE void accesses_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
