// Chooses the thread that runs next. A thread runs until it waits or, unless the order is EMULATED_NEXT, signals.
#pragma once
#include "state.h"

#include <algorithm>

namespace {

std::vector<uint32_t> place_of, thread_at;  // a thread's place in the order, and the inverse
std::vector<uint64_t> ready;                // one bit for each place: whether its thread can run
uint64_t random_state;

uint32_t draw() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return static_cast<uint32_t>(random_state >> 32);
}

void set_wait(Thread &t, Wait wait) {
    t.wait = wait;
    const uint32_t place = place_of[t.index];
    const uint64_t bit = 1ull << place % 64;
    ready[place / 64] = wait == RUNNABLE ? ready[place / 64] | bit : ready[place / 64] & ~bit;
}

// Orders all threads of the blocks that run together.
void order_threads() {
    const size_t count = threads.size();
    const EmulatedSchedule &s = launch->schedule;
    thread_at.resize(count);
    place_of.resize(count);
    ready.assign((count + 63) / 64, 0);
    for (uint32_t i = 0; i < count; i++) thread_at[i] = i;
    if (s.order == EMULATED_LAST) std::reverse(thread_at.begin(), thread_at.end());
    if (s.order == EMULATED_GROUPS) {
        std::vector<uint32_t> rank((count + 127) / 128);
        for (uint32_t i = 0; i < rank.size(); i++) rank[i] = i;
        for (uint32_t i = 0; i < rank.size(); i++) std::swap(rank[i], rank[i + draw() % (rank.size() - i)]);
        std::stable_sort(thread_at.begin(), thread_at.end(), [&](uint32_t x, uint32_t y) { return rank[x / 128] < rank[y / 128]; });
    }
    for (uint32_t i = 0; i < count; i++) place_of[thread_at[i]] = i;
}

// Returns the first thread that can run, beginning at place `from` of the order.
Thread *first_ready(size_t from) {
    const size_t words = ready.size();
    for (size_t n = 0, i = from / 64; n <= words; n++, i = i + 1 == words ? 0 : i + 1) {
        uint64_t word = ready[i];
        if (n == 0) word &= ~0ull << from % 64;
        if (word) return &threads[thread_at[i * 64 + __builtin_ctzll(word)]];
    }
    return nullptr;
}

void bring_memory(Block &block);
bool land_one();  // completes one asynchronous copy; false if none is under way
void check_end();
[[noreturn]] void deadlock(const char *what);

void run(Thread *to) {
    Thread *from = current;
    if (to == from) return;
    if (to->block != loaded) bring_memory(*to->block);
    current = to;
    emulation_switch(&from->stack_pointer, to->stack_pointer);
}

size_t behind(const Thread &t) { return place_of[t.index] + 1 == threads.size() ? 0 : place_of[t.index] + 1; }

Thread *chosen() {
    if (launch->schedule.landing == EMULATED_SOMETIME && draw() % 4 == 0) land_one();
    switch (launch->schedule.order) {
        case EMULATED_NEXT: return first_ready(behind(*current));
        case EMULATED_ANY: return first_ready(draw() % threads.size());
        default: return first_ready(0);
    }
}

// The current thread waits; returns when it can run again.
void wait_for_turn() {
    for (;;) {
        if (Thread *to = chosen()) return run(to);
        if (exited == threads.size()) {
            check_end();
            leave();
        }
        if (land_one()) continue;
        deadlock("deadlock");
    }
}

// The current thread has signalled: threads that wait for this may run first.
void give_way() {
    if (launch->schedule.order != EMULATED_NEXT || launch->schedule.landing == EMULATED_SOMETIME) run(chosen());
}

// The current thread polls: all others run before it does again.
void let_others_run() {
    if (launch->schedule.landing != EMULATED_AT_ONCE && draw() % 8 == 0) land_one();
    run(first_ready(behind(*current)));
}

}  // namespace
