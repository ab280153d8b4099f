// The functions of cuda_src/ptx/cluster.cuh. Blocks that run together are a cluster: it has a barrier with rounds, and
// threads store to other blocks' shared memory by st.async. The barrier is relaxed: it does not order accesses.
#pragma once
#include "copies.h"

namespace {

void leave_cluster_round() {
    if (--missing) return;
    cluster_rounds++;
    for (Thread &t : threads) {
        missing += t.wait != EXITED;
        if (t.wait == AT_CLUSTER) set_wait(t, RUNNABLE);
    }
    idle = 0;
}

}  // namespace

extern "C" {

void emulation_tx_barrier_open(const void *barrier, int bytes) {
    const unsigned address = emulation_shared_address(barrier);
    emulation_mbarrier_init(address, 1);
    emulation_mbarrier_fence();
    emulation_mbarrier_arrive(address, bytes);
}

void emulation_cluster_arrive() {
    enter(SITE);
    if (current->cluster_rounds > cluster_rounds) fail(SITE, "arrives twice at the cluster's barrier before the others are there");
    current->cluster_rounds++;
    leave_cluster_round();
    give_way();
}

void emulation_cluster_wait() {
    enter(SITE);
    current->cluster_waited = true;
    if (current->cluster_rounds <= cluster_rounds) return;
    set_wait(*current, AT_CLUSTER);
    wait_for_turn();
}

void emulation_dsmem_store(const void *place, unsigned x, const void *barrier, unsigned rank) {
    current->site = SITE;
    if (!current->cluster_waited) fail(SITE, "stores to the shared memory of block %u, which may not have begun", rank);
    const unsigned block = (rank + 1) * OF_BLOCK;
    emulation_remote_store(block + emulation_shared_address(place), &x, sizeof x, block + emulation_shared_address(barrier));
}

void emulation_tx_barrier_wait(const void *barrier) { emulation_mbarrier_wait(emulation_shared_address(barrier), 0); }

}  // extern "C"
