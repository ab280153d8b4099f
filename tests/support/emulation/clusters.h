// The words of cuda_src/ptx/cluster.cuh: blocks that run together are a cluster, whose barrier goes in rounds, and whose
// threads store to the shared memory of others.
#pragma once
#include "memory.h"
#include "schedule.h"

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

void emulation_tx_barrier_open(int bytes) { current->block->bytes_awaited = static_cast<unsigned>(bytes); }

void emulation_cluster_arrive() {
    enter(SITE);
    current->block->cluster_arrived++;
    if (current->cluster_rounds > cluster_rounds) fail(SITE, "arrives twice at the cluster's barrier before the others are there");
    current->cluster_rounds++;
    leave_cluster_round();
    give_way();
}

void emulation_cluster_wait() {
    enter(SITE);
    if (current->cluster_rounds <= cluster_rounds) return;
    set_wait(*current, AT_CLUSTER);
    wait_for_turn();
}

void emulation_dsmem_store(unsigned *place, unsigned x, unsigned rank) {
    uintptr_t address = reinterpret_cast<uintptr_t>(place);
    if (rank >= blocks.size()) fail(SITE, "stores to the shared memory of block %u of a cluster of %zu", rank, blocks.size());
    if (address - image->low + sizeof x > image->high - image->low) fail(SITE, "a store to %#zx, which is not shared", address);
    Block &to = blocks[rank];
    if (to.cluster_arrived < to.threads) fail(SITE, "stores to the shared memory of block %u, which may not have begun", rank);
    size_t index = address - image->low;
    memcpy(&to == loaded ? reinterpret_cast<unsigned char *>(place) : to.shared.data() + index, &x, sizeof x);
    for (size_t i = 0; i < sizeof x; i++) {
        to.cells[index + i].written = now;
        to.cells[index + i].writer = NOBODY;
    }
    to.bytes_received += sizeof x;
    idle = 0;
}

void emulation_tx_barrier_wait() {
    Block &block = *current->block;
    while (block.bytes_received < block.bytes_awaited) emulation_yield();
    if (block.bytes_received > block.bytes_awaited) fail(SITE, "more bytes than the barrier awaits");
    block.epoch = ++now;  // what came before is ordered before what comes now
}

}  // extern "C"
