// Which accesses happened before those of the current thread. In a launch without mbarriers: those before the block's
// last barrier, and those of its warp before the last __syncwarp. With mbarriers each thread has a vector clock, and
// barriers of all kinds join clocks.
#pragma once
#include "state.h"

namespace {

size_t clock_length() { return (threads.size() + MOST_BARRIERS * blocks.size() + 15) & ~size_t(15); }
size_t clock_index(const Block &block, uint16_t who) {
    if (who < BY_BARRIER) return block.first->index + who;
    return threads.size() + MOST_BARRIERS * static_cast<size_t>(&block - &blocks[0]) + (who - BY_BARRIER);
}

// Of functions that pass over whole clocks: compiled for AVX2 too, which the loader chooses where the processor has it.
#if defined(__x86_64__)
#define OVER_CLOCKS __attribute__((optimize("O3"), target_clones("avx2", "default")))
#else
#define OVER_CLOCKS __attribute__((optimize("O3")))
#endif

void clear(Clock &clock) {
    for (std::vector<int32_t> *times : {&clock.known, &clock.fenced, &clock.used}) {
        times->resize(clock_length());
        memset(times->data(), 0, times->size() * sizeof(int32_t));
    }
}
OVER_CLOCKS void join(std::vector<int32_t> &into, const std::vector<int32_t> &from) {
    int32_t *x = into.data();
    const int32_t *y = from.data();
    for (size_t i = 0, n = into.size() & ~size_t(15); i < n; i++) x[i] = x[i] < y[i] ? y[i] : x[i];
}
// Whether no time of the first is later than that of the second.
OVER_CLOCKS bool none_later(const int32_t *times, const int32_t *known, size_t count) {
    int32_t later = 0;
    for (size_t i = 0; i < count; i++) later |= known[i] < times[i];
    return !later;
}
void join(Clock &into, const Clock &from) {
    join(into.known, from.known);
    join(into.fenced, from.fenced);
    join(into.used, from.used);
}

// Threads that join this thread's clock from now on know all its accesses so far.
void publish(Thread &t) { t.clock.known[t.index] = static_cast<int32_t>(now++); }

void begin_clocks() {
    if (clocked) return;
    clocked = true;
    for (Thread &t : threads) clear(t.clock);
}

// Some threads have synchronized: each knows the accesses of all of them.
template <class Threads>
void meet(const Threads &met) {
    static Clock all;  // keeps its memory
    const Thread *first = nullptr;
    for (Thread *t : met) {
        t->clock.known[t->index] = static_cast<int32_t>(now);
        if (first) join(all, t->clock);
        else all = t->clock;
        first = t;
    }
    now++;
    for (Thread *t : met) t->clock = all;
}

// Whether the current thread knows an access of a block's thread (or copy) at a time.
bool known(const Block &block, uint16_t who, uint32_t when) {
    const Thread &self = *current;
    const bool own = &block == self.block;
    if (own && (when < block.epoch || who == self.number)) return true;
    if (who >= MBARRIER) return false;
    if (!clocked)
        return own && who < BY_BARRIER && who / launch->warp == self.number / launch->warp && when < self.warp->synced;
    return static_cast<uint32_t>(self.clock.known[clock_index(block, who)]) >= when;
}
// Whether TMA and the tensor cores, if the current thread starts them, see that access: a thread's write needs a
// fence.proxy.async.
bool known_to_proxy(const Block &block, uint16_t who, uint32_t when) {
    if (who >= BY_BARRIER) return known(block, who, when);
    return static_cast<uint32_t>(current->clock.fenced[clock_index(block, who)]) >= when;
}

}  // namespace
