// Platform ops for the blocks of a cluster, which run concurrently and store into each other's shared memory (DSMEM).
// Before sm_90 they do nothing: no plan launches clusters there.
#pragma once

#include "mbarrier.cuh"

// Called by one warp: initializes the mbarrier and sets its expected transaction bytes. All blocks of the cluster do so
// before any leaves cluster_wait(), after which peers may store. (A single thread needs no __syncwarp between the two,
// but without it racecheck takes it for another unit than the one that initializes.)
DEVICE void tx_barrier_open(word64* barrier, int bytes) {
#if FP8CORE_PTX >= 900
    if (lane() == 0) {
        barrier_init(shared_address(barrier), 1);
        barrier_init_fence();
    }
    __syncwarp();
    if (lane() == 0) barrier_expect(shared_address(barrier), bytes);
#elif defined(FP8CORE_EMULATION)
    if (lane() == 0) emulation_tx_barrier_open(barrier, bytes);
#endif
}
// Relaxed: it orders nothing but the opening of the barrier before the peers' wait. A launch without clusters must not
// call it: without a cluster both instructions are barrier 0 of the block.
DEVICE void cluster_arrive() {
#if FP8CORE_PTX >= 900
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#elif defined(FP8CORE_EMULATION)
    emulation_cluster_arrive();
#endif
}
DEVICE void cluster_wait() {
#if FP8CORE_PTX >= 900
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#elif defined(FP8CORE_EMULATION)
    emulation_cluster_wait();
#endif
}
// Stores x at `place` in the shared memory of block `rank`, and counts its bytes at that block's barrier.
DEVICE void dsmem_store(unsigned* place, unsigned x, word64* barrier, unsigned rank) {
#if FP8CORE_PTX >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
                     cluster_address(shared_address(place), rank)),
                 "r"(x), "r"(cluster_address(shared_address(barrier), rank))
                 : "memory");
#elif defined(FP8CORE_EMULATION)
    emulation_dsmem_store(place, x, barrier, rank);
#endif
}
// The addresses of `place` and a barrier in block `rank`, computed early. Every lane of a warp makes one.
struct RemotePlace {
#if FP8CORE_PTX >= 900
    unsigned place, barrier;
    RemotePlace() = default;
    DEVICE RemotePlace(unsigned* p, word64* its_barrier, unsigned rank)
        : place(computed_here(cluster_address(shared_address(p), rank))),
          barrier(computed_here(cluster_address(shared_address(its_barrier), rank))) {}
    // Stores x `words` words after the place, and counts it at the barrier `barriers` after the given one.
    DEVICE void store(unsigned x, int words, int barriers) const {
        asm volatile(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(place + 4 * words),
            "r"(x), "r"(barrier + 8 * barriers)
            : "memory");
    }
#else
    unsigned* place;
    word64* barrier;
    unsigned rank;
    RemotePlace() = default;
    DEVICE RemotePlace(unsigned* p, word64* its_barrier, unsigned r) : place(p), barrier(its_barrier), rank(r) {}
    DEVICE void store(unsigned x, int words, int barriers) const {
        dsmem_store(place + words, x, barrier + barriers, rank);
    }
#endif
};
// Waits until all expected bytes have arrived.
DEVICE void tx_barrier_wait(word64* barrier) {
#if FP8CORE_PTX >= 900
    barrier_wait(shared_address(barrier), 0);
#elif defined(FP8CORE_EMULATION)
    emulation_tx_barrier_wait(barrier);
#endif
}

#if FP8CORE_PTX >= 900
// ---- arrivals at, and stores into, another block, by 32-bit addresses (`cluster_address`)

DEVICE void remote_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Stores floats into another block's shared memory and counts their bytes at its barrier.
DEVICE void remote_store(unsigned destination, float2 v, unsigned barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(destination),
        "f"(v.x), "f"(v.y), "r"(barrier)
        : "memory");
}
DEVICE void remote_store(unsigned destination, float4 v, unsigned barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(destination),
        "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
        : "memory");
}
#endif
