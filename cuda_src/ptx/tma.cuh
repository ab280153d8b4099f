// Copies into shared memory without registers: TMA, which takes tiles of a two-dimensional tensor (columns first)
// by a tensor map, and cp.async, which takes single words. Addresses in shared memory are 32-bit numbers.
#pragma once
#include "../platform.cuh"

struct alignas(64) TensorMap {
    char bytes[128];
};

// Of a warp: true in one lane, which the compiler knows to be one. Where it only knows that a lane's number is 0, each
// copy by TMA becomes a loop over the lanes that might differ.
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
// The same into each block of the cluster whose bit is set in `blocks`: at the same place, counted at the same barrier.
DEVICE void tile_load_shared(unsigned destination, const TensorMap* map, int column, int row, unsigned barrier,
                             int blocks) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination),
                 "l"(map), "r"(column), "r"(row), "r"(barrier), "h"((unsigned short)blocks)
                 : "memory");
}
// The same as the first, with a policy of L2.
constexpr word64 EVICT_NORMAL = 0x1000000000000000ull, EVICT_FIRST = 0x12F0000000000000ull,
                 EVICT_LAST = 0x14F0000000000000ull;
DEVICE void tile_load(unsigned destination, const TensorMap* map, int column, int row, unsigned barrier,
                      word64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination),
                 "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
                 : "memory");
}
// The second, with a policy of L2.
DEVICE void tile_load_shared(unsigned destination, const TensorMap* map, int column, int row, unsigned barrier,
                             int blocks, word64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
                 ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(destination),
                 "l"(map), "r"(column), "r"(row), "r"(barrier), "h"((unsigned short)blocks), "l"(policy)
                 : "memory");
}
// Asks for a tile into L2, where a load of it finds it later.
DEVICE void tile_prefetch(const TensorMap* map, int column, int row) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(column), "r"(row)
                 : "memory");
}
// Of what is read once.
DEVICE void tile_load_once(unsigned destination, const TensorMap* map, int column, int row, unsigned barrier) {
    tile_load(destination, map, column, row, barrier, EVICT_FIRST);
}

// ---- stores: a thread's, in groups, whose sources may be written again when they are read

DEVICE void tile_store(const TensorMap* map, unsigned source, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(source), "r"(column), "r"(row)
                 : "memory");
}
DEVICE void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until the sources of all but the last PENDING groups are read.
template <int PENDING>
DEVICE void stores_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// ---- cp.async: a thread's copies count once at a barrier when they are in

DEVICE void word_copy(unsigned destination, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(destination), "l"(source) : "memory");
}
// 16 bytes, of which the first ``bytes`` are read and the others zero.
DEVICE void vector_copy(unsigned destination, const void* source, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes)
                 : "memory");
}
DEVICE void words_arrive(unsigned barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
DEVICE void words_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Puts this thread's accesses to shared memory before those of TMA and the tensor cores behind a barrier: its stores are
// seen by then, and its loads are over.
DEVICE void accesses_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
