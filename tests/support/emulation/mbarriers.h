// mbarriers, named barriers and addresses of shared memory, for the functions of hopper.h.
#pragma once
#include "memory.h"
#include "schedule.h"

namespace {

// 32-bit addresses of shared memory: variables begin after STATICS, dynamic memory at DYNAMIC, which kernels round up.
constexpr unsigned DYNAMIC = 1040, STATICS = 1u << 18, OF_BLOCK = 1u << 24;

struct SharedPlace {
    Block *block;
    size_t index;  // in Block::cells
};

unsigned variables_begin() { return STATICS + static_cast<unsigned>(image->low % 1024); }

// Returns the index in Block::cells of an address in a block.
size_t shared_index(unsigned address) {
    return address < STATICS ? image->high - image->low + address - DYNAMIC : address - variables_begin();
}

SharedPlace place_at(unsigned address, size_t bytes, uintptr_t site, const char *what) {
    Block *block = current->block;
    if (address >= OF_BLOCK) {
        if (address / OF_BLOCK > blocks.size()) fail(site, "%s in block %u of a cluster of %zu", what, address / OF_BLOCK - 1, blocks.size());
        block = &blocks[address / OF_BLOCK - 1];
    }
    address %= OF_BLOCK;
    const size_t statics = image->high - image->low, index = shared_index(address);
    if (address < STATICS ? address < DYNAMIC || index + bytes > shared_length() : index + bytes > statics)
        fail(site, "%s at %#x, %zu bytes that are not all in shared memory", what, address, bytes);
    if (block->exited == block->threads) fail(site, "%s in block %u of the cluster, which has ended", what, address / OF_BLOCK);
    return {block, index};
}

unsigned char *memory_at(const Block &block, size_t index) {
    const size_t statics = image->high - image->low;
    if (index >= statics) return block.dynamic + (index - statics);
    return &block == loaded ? reinterpret_cast<unsigned char *>(image->low) + index
                            : const_cast<unsigned char *>(block.shared.data()) + index;
}

// ---- mbarriers

Barrier &barrier_at(unsigned address, uintptr_t site) {
    const SharedPlace at = place_at(address, 8, site, "an mbarrier");
    for (Barrier &b : at.block->barriers)
        if (b.address == address % OF_BLOCK) return b;
    fail(site, "no mbarrier was initialized at %#x", address);
}

void complete(Barrier &b, uintptr_t site) {
    if (b.left || b.bytes) return;
    for (Thread &t : threads)
        if (t.awaited == &b) {
            if (t.wait != AT_MBARRIER) fail(site, "an mbarrier completes two phases while thread %u of its block waits for the first", t.number);
            set_wait(t, RUNNABLE);
        }
    b.phase++;
    b.left = b.expected;
    b.passed = b.arriving;
    clear(b.arriving);
    idle = 0;
}

void arrive(Barrier &b, long bytes, uintptr_t site) {
    if (b.initializer->block != current->block && !b.fenced)
        fail(site, "arrives at another block's mbarrier, whose initialization was not fenced");
    if (b.left == 0) fail(site, "more arrive at an mbarrier than the %d that it awaits", b.expected);
    b.left--;
    b.bytes += bytes;
    if (b.bytes >= 1 << 20) fail(site, "an mbarrier awaits %ld bytes, more than it can count", b.bytes);
    publish(*current);
    if (b.initializer->block != current->block) b.from_peers[current->index] = current->clock.known[current->index];
    join(b.arriving, current->clock);
    complete(b, site);
}

// Called when the last thread of a block returns. A signal of another block is an access of this block's memory: some
// thread of this block must know by then that it came. A relaxed barrier of the cluster tells no thread so.
void check_signals_of_peers(const Block &block) {
    for (const Barrier &b : block.barriers)
        for (const auto &[peer, when] : b.from_peers) {
            bool seen = false;
            for (unsigned i = 0; i < block.threads; i++) seen |= block.first[i].clock.known[peer] >= when;
            if (!seen) fail(0, "the block ends and has not awaited a signal of block %u of the cluster", threads[peer].known.block.x);
        }
}

// Counts the bytes of a copy that has landed; this carries no thread's clock.
void count_bytes(Block &block, Barrier &b, long bytes, bool arrives, uintptr_t site) {
    b.bytes -= bytes;
    if (arrives && b.left-- == 0) fail(site, "more arrive at an mbarrier than the %d that it awaits", b.expected);
    if (b.bytes <= -(1 << 20)) fail(site, "more bytes came to an mbarrier than it can count");
    b.arriving.known[clock_index(block, b.slot)] = static_cast<int32_t>(now++);
    complete(b, site);
}

bool has_passed(const Barrier &b, unsigned parity) { return (b.phase & 1) != parity; }

void check_named_barriers() {
    for (const Block &block : blocks)
        for (int i = 0; i < 16; i++)
            if (block.named[i].arrived)
                fail(0, "the block ends with %u threads at named barrier %d, which %u share", block.named[i].arrived, i, block.named[i].threads);
}

}  // namespace

extern "C" {

unsigned emulation_shared_address(const void *place) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(place);
    const uintptr_t dynamic = address - reinterpret_cast<uintptr_t>(current->block->dynamic);
    if (dynamic < dynamic_stride) return DYNAMIC + static_cast<unsigned>(dynamic);
    return variables_begin() + static_cast<unsigned>(address - image->low);
}
char *emulation_shared_place(unsigned address) {
    if (address >= OF_BLOCK) fail(SITE, "a thread's own access to another block's shared memory");
    if (address >= STATICS) return reinterpret_cast<char *>(image->low) + (address - variables_begin());
    return reinterpret_cast<char *>(current->block->dynamic) + (static_cast<int>(address) - static_cast<int>(DYNAMIC));
}
unsigned emulation_loose_word(const char *place) {
    check(reinterpret_cast<uintptr_t>(place), 4, LOOSE_READ, true, SITE);
    unsigned word;
    memcpy(&word, place, sizeof word);
    return word;
}

void emulation_mbarrier_init(unsigned address, int arrivals) {
    begin_clocks();
    const SharedPlace at = place_at(address, 8, SITE, "an mbarrier");
    if (address % 8) fail(SITE, "an mbarrier at %#x, which is no multiple of 8", address);
    if (arrivals < 1 || arrivals >= 1 << 20) fail(SITE, "an mbarrier of %d arrivals", arrivals);
    Block &block = *at.block;
    for (size_t i = 0; i < 8; i++) {
        Cell &cell = block.cells[at.index + i];
        if (cell.writer == MBARRIER && cell.written >= block.first_epoch) fail(SITE, "an mbarrier is initialized where there is one");
        cell.writer = MBARRIER;
        cell.written = now;
    }
    if (block.barriers.size() == MOST_BARRIERS) fail(SITE, "more than %zu mbarriers", MOST_BARRIERS);
    const auto slot = static_cast<uint16_t>(BY_BARRIER + block.barriers.size());
    block.barriers.push_back({address, arrivals, arrivals, 0, 0, false, slot, current, {}, {}, {}});
    clear(block.barriers.back().arriving);
    clear(block.barriers.back().passed);
}
void emulation_mbarrier_fence() {
    for (Barrier &b : current->block->barriers) b.fenced |= b.initializer == current;
}
void emulation_mbarrier_arrive(unsigned address, int bytes) {
    enter(SITE);
    arrive(barrier_at(address, SITE), bytes, SITE);
    give_way();
}
bool emulation_mbarrier_passed(unsigned address, unsigned parity) {
    if (!has_passed(barrier_at(address, SITE), parity)) emulation_yield();
    return has_passed(barrier_at(address, SITE), parity);
}
void emulation_mbarrier_wait(unsigned address, unsigned parity) {
    Thread &self = *current;
    enter(SITE);
    give_way();
    Barrier &b = barrier_at(address, SITE);
    if (address >= OF_BLOCK) fail(SITE, "waits at another block's mbarrier");
    if (!has_passed(b, parity)) {
        self.awaited = &b;
        set_wait(self, AT_MBARRIER);
        wait_for_turn();
        self.awaited = nullptr;
    }
    join(self.clock, b.passed);
}

void emulation_named_barrier(int number, int count, int waits) {
    Thread &self = *current;
    enter(SITE);
    begin_clocks();
    if (number < 1 || number > 15) fail(SITE, "the named barrier %d: there are 1 to 15", number);
    if (count < 1 || count % launch->warp || static_cast<unsigned>(count) > self.block->threads)
        fail(SITE, "a named barrier of %d threads in a block of %u", count, self.block->threads);
    Named &b = self.block->named[number];
    if (!b.arrived) {
        b.threads = static_cast<unsigned>(count);
        b.who.assign(self.block->threads, false);
        clear(b.arriving);
    }
    if (b.threads != static_cast<unsigned>(count)) fail(SITE, "named barrier %d is shared by %u threads, and by %d", number, b.threads, count);
    if (b.who[self.number]) fail(SITE, "arrives twice at named barrier %d before the others are there", number);
    b.who[self.number] = true;
    publish(self);
    join(b.arriving, self.clock);
    if (++b.arrived == b.threads) {
        for (unsigned i = 0; i < self.block->threads; i++) {
            Thread &t = self.block->first[i];
            if (t.wait == AT_NAMED && t.source == static_cast<unsigned>(number)) {
                join(t.clock, b.arriving);
                set_wait(t, RUNNABLE);
            }
        }
        if (waits) join(self.clock, b.arriving);
        b.arrived = 0;
        idle = 0;
    } else if (waits) {
        self.source = static_cast<unsigned>(number);
        set_wait(self, AT_NAMED);
        wait_for_turn();
        return;
    }
    give_way();
}

}  // extern "C"
