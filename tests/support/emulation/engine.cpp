// Runs kernels that were compiled as C++ (words.h): every thread of a block is a fiber, and one fiber at a time runs
// until it waits. Blocks run one after another, those of a cluster or of a cooperative grid together. Kernels are
// compiled with -fsanitize=kernel-address, which calls hooks.h before every access. memory.h checks accesses;
// clusters.h, mbarriers.h, copies.h and tensor_cores.h implement and check Hopper's asynchronous operations.
#include "clusters.h"
#include "hooks.h"
#include "tensor_cores.h"

#include <sys/mman.h>

namespace {

void keep(Block &block) {
    const auto *variables = reinterpret_cast<unsigned char *>(image->low);
    block.shared.assign(variables, variables + (image->high - image->low));
}

void bring_memory(Block &block) {
    keep(*loaded);
    for (const Variable &v : image->shared)
        memcpy(reinterpret_cast<void *>(v.address), block.shared.data() + (v.address - image->low), v.bytes);
    loaded = &block;
}

void poison() {
    for (const Variable &v : image->shared) memset(reinterpret_cast<void *>(v.address), POISON, v.bytes);
    for (size_t b = 0; b < blocks.size(); b++) memset(dynamic_memory + b * dynamic_stride, POISON, launch->shared_bytes);
}

std::string span(const std::vector<unsigned> &numbers) {
    std::string text;
    for (size_t i = 0; i < numbers.size();) {
        size_t j = i;
        while (j + 1 < numbers.size() && numbers[j + 1] == numbers[j] + 1) j++;
        text += (text.empty() ? "" : ", ") + std::to_string(numbers[i]);
        if (j > i) text += "-" + std::to_string(numbers[j]);
        i = j + 1;
    }
    return text.empty() ? "none" : text;
}

[[noreturn]] void deadlock(const char *what) {
    for (Block &block : blocks) {
        std::vector<unsigned> at[EXITED + 1];
        for (unsigned i = 0; i < block.threads; i++) at[block.first[i].wait].push_back(i);
        if (at[EXITED].size() == block.threads) continue;
        for (unsigned i = 0; i < block.threads; i++)
            if (block.first[i].wait != EXITED) {
                current = &block.first[i];
                break;
            }
        fail(current->site, "%s: threads %s wait at the block's barrier, %s in a collective of their warp, %s at an mbarrier, "
             "%s at a named barrier, %s at the cluster's, %s poll, %s have returned",
             what, span(at[AT_BARRIER]).c_str(), span(at[AT_COLLECTIVE]).c_str(), span(at[AT_MBARRIER]).c_str(),
             span(at[AT_NAMED]).c_str(), span(at[AT_CLUSTER]).c_str(), span(at[RUNNABLE]).c_str(), span(at[EXITED]).c_str());
    }
    leave();
}

[[noreturn]] void thread_main() {
    launch->call(launch->arguments);
    if (overwrite.bytes) check_overwrite();
    check_return();
    Thread *self = current;
    set_wait(*self, EXITED);
    self->warp->exited |= 1ull << self->known.lane;
    self->block->exited++;
    exited++;
    idle = 0;
    if (self->block->exited == self->block->threads) check_signals_of_peers(*self->block);
    if (self->cluster_rounds == cluster_rounds) leave_cluster_round();
    if (self->block->arrived) fail(0, "returned while threads of its block wait at a barrier");
    if (self->warp->waiting) {
        for (unsigned lane = 0; lane < launch->warp; lane++)
            if (self->warp->waiting >> lane & 1) {
                Thread &t = self->warp->first[lane];
                if (t.mask >> self->known.lane & 1)
                    fail(t.site, "returned while lanes %#llx of its warp wait for it in a collective",
                         static_cast<unsigned long long>(self->warp->waiting));
            }
    }
    wait_for_turn();
    __builtin_unreachable();
}

void start_block(Block &block, size_t slot, EmulatedIndex at) {
    const uint32_t *size = launch->block;
    unsigned count = size[0] * size[1] * size[2], warp = launch->warp;
    block.threads = count;
    block.arrived = block.exited = block.votes = 0;
    block.first_epoch = block.epoch = ++now;
    block.dynamic = dynamic_memory + slot * dynamic_stride;
    block.free_readers.resize(block.readers.size());  // whose memory is kept
    for (size_t i = 0; i < block.readers.size(); i++) block.free_readers[i] = static_cast<uint32_t>(i);
    block.barriers.clear();
    block.barriers.reserve(MOST_BARRIERS);  // waiting threads hold the addresses of barriers
    for (Named &named : block.named) named.arrived = 0;
    block.reads.clear();
    block.reads_low = SIZE_MAX;
    block.reads_high = 0;
    block.first = &threads[slot * count];
    block.warps.assign((count + warp - 1) / warp, Warp{});
    block.cells.resize(shared_length());
    for (unsigned i = 0; i < count; i++) {
        Thread &t = block.first[i];
        t.known.thread = {i % size[0], i / size[0] % size[1], i / (size[0] * size[1])};
        t.known.block = at;
        t.known.block_size = {size[0], size[1], size[2]};
        t.known.grid_size = {launch->grid[0], launch->grid[1], launch->grid[2]};
        t.known.lane = i % warp;
        t.known.warp_size = warp;
        t.block = &block;
        t.warp = &block.warps[i / warp];
        t.warp->lanes |= 1ull << t.known.lane;
        if (t.known.lane == 0) t.warp->first = &t;
        t.index = static_cast<unsigned>(slot * count + i);
        t.number = static_cast<uint16_t>(i);
        set_wait(t, RUNNABLE);
        t.site = 0;
        t.awaited = nullptr;
        t.cluster_rounds = t.products = t.stores = 0;
        t.products_fenced = t.cluster_waited = false;
        t.issued.clear();
        t.sums.clear();
        t.copies.clear();
        t.storing.clear();
        if (clocked) clear(t.clock);
        t.stack_pointer = fresh_stack(stacks + (t.index + 1) * STACK, thread_main);
    }
}

void run_blocks() {
    exited = cluster_rounds = 0;
    missing = static_cast<unsigned>(threads.size());
    flights.clear();
    loaded = &blocks[0];
    current = first_ready(0);
    if (current->block != loaded) bring_memory(*current->block);
    emulation_switch(&main_pointer, current->stack_pointer);
}

void ensure_memory(size_t fibers, size_t dynamic, size_t together) {
    if (fibers > stacks_count) {
        if (stacks) munmap(stacks, stacks_count * STACK);
        stacks = static_cast<unsigned char *>(
            mmap(nullptr, fibers * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        stacks_count = fibers;
    }
    dynamic_stride = (dynamic + GUARD + 4095) & ~size_t(4095);
    if (together * dynamic_stride > dynamic_capacity) {
        if (dynamic_memory) munmap(dynamic_memory, dynamic_capacity);
        dynamic_capacity = together * dynamic_stride;
        dynamic_memory = static_cast<unsigned char *>(
            mmap(nullptr, dynamic_capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    }
}

}  // namespace

extern "C" {

int emulation_launch(EmulatedLaunch *asked) {
    launch = asked;
    image = &image_of(*asked);
    failed = false;
    overwrite.bytes = 0;
    idle = 0;
    last_array = 0;
    clocked = false;
    random_state = 0x9E3779B97F4A7C15ull * (asked->schedule.seed + 1);
    if (now > INT32_MAX / 2) {
        // Cells hold times, so restart the time with new cells.
        now = 0;
        blocks.clear();
    }
    const uint32_t *grid = asked->grid, *size = asked->block;
    size_t total = size_t(grid[0]) * grid[1] * grid[2], count = size_t(size[0]) * size[1] * size[2];
    size_t resident = asked->together ? asked->together : total;
    ensure_memory(resident * count, asked->shared_bytes, resident);
    threads.resize(resident * count);
    blocks.resize(resident);
    auto place = [&](size_t b) {
        return EmulatedIndex{unsigned(b % grid[0]), unsigned(b / grid[0] % grid[1]), unsigned(b / grid[0] / grid[1])};
    };
    uint64_t saved = flush_subnormals(asked->flush_subnormals);
    for (size_t first = 0; first < total && !failed; first += resident) {
        poison();
        order_threads();
        for (size_t b = 0; b < resident; b++) {
            start_block(blocks[b], b, place(first + b));
            if (resident > 1) keep(blocks[b]);
        }
        run_blocks();
    }
    restore_subnormals(saved);
    current = nullptr;
    return failed;
}

const EmulatedThread *emulation_thread() { return &current->known; }

void *emulation_dynamic_shared() { return current->block->dynamic; }

unsigned emulation_barrier(int predicate, EmulatedVote vote) {
    Thread *self = current;
    Block &block = *self->block;
    enter(SITE);
    if (block.exited) fail(self->site, "%u threads of the block returned before this barrier", block.exited);
    block.arrived++;
    block.votes += predicate != 0;
    if (block.arrived < block.threads) {
        set_wait(*self, AT_BARRIER);
        wait_for_turn();
        return static_cast<unsigned>(self->result);
    }
    unsigned result = vote == EMULATED_COUNT ? block.votes
                      : vote == EMULATED_AND ? block.votes == block.threads
                                             : block.votes != 0;
    block.arrived = block.votes = 0;
    block.epoch = ++now;
    idle = 0;
    std::vector<Thread *> all;
    for (unsigned i = 0; i < block.threads; i++) {
        set_wait(block.first[i], RUNNABLE);
        block.first[i].result = result;
        all.push_back(&block.first[i]);
    }
    if (clocked) meet(all);
    give_way();
    return result;
}

uint64_t emulation_collective(EmulatedCollective kind, uint64_t mask, uint64_t value, unsigned source) {
    Thread *self = current;
    Warp &warp = *self->warp;
    enter(SITE);
    self->kind = kind;
    self->mask = mask & warp.lanes;
    self->value = value;
    self->source = source;
    uint64_t lane = 1ull << self->known.lane, needed = self->mask;
    if (!(needed & lane)) fail(self->site, "lane %u is not in its own mask %#llx", self->known.lane, static_cast<unsigned long long>(mask));
    if (needed & warp.exited)
        fail(self->site, "lanes %#llx of the warp returned before this collective of theirs",
             static_cast<unsigned long long>(needed & warp.exited));
    warp.waiting |= lane;
    bool complete = (warp.waiting & needed) == needed;
    for (unsigned i = 0; complete && i < launch->warp; i++)
        if (needed >> i & 1) complete = warp.first[i].kind == kind && warp.first[i].mask == needed;
    if (!complete) {
        set_wait(*self, AT_COLLECTIVE);
        wait_for_turn();
        return self->result;
    }
    uint64_t ballot = 0;
    std::vector<Thread *> met;
    for (unsigned i = 0; i < launch->warp; i++)
        if (needed >> i & 1 && warp.first[i].value) ballot |= 1ull << i;
    for (unsigned i = 0; i < launch->warp; i++) {
        if (!(needed >> i & 1)) continue;
        Thread &t = warp.first[i];
        if (kind == EMULATED_EXCHANGE) {
            if (t.source >= launch->warp || !(needed >> t.source & 1))
                fail(t.site, "lane %u reads from lane %u, which takes no part", i, t.source);
            t.result = warp.first[t.source].value;
        } else {
            t.result = ballot;
        }
        set_wait(t, RUNNABLE);
        if (kind == EMULATED_SYNC) met.push_back(&t);
    }
    if (kind == EMULATED_SYNC) warp.synced = ++now;
    if (kind == EMULATED_SYNC && clocked) meet(met);
    warp.waiting &= ~needed;
    idle = 0;
    give_way();
    return self->result;
}

void emulation_yield() {
    enter(SITE);
    if (++idle > 64 * threads.size() + 4096) deadlock("nothing moves any more");
    let_others_run();
}

void emulation_atomic(const void *address, size_t bytes) {
    check(reinterpret_cast<uintptr_t>(address), bytes, UPDATE, true, SITE);
    if (launch->together != 1) emulation_yield();
}

void emulation_trap(const char *why) { fail(SITE, "%s", why); }
}  // extern "C"
