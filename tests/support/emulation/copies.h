// Asynchronous copies, by TMA, cp.async and st.async. No thread may access the bytes of a load until it has landed and
// the thread has awaited its mbarrier. The bytes of a store may not be written until its read is awaited. The schedule
// decides when loads land and stores read: at once, as late as possible, or in between.
#pragma once
#include "mbarriers.h"

namespace {

// The content of a tensor map, as tests write it (hopper.py).
struct Map {
    long long memory, rows, columns, stride, box_rows, box_columns, item, swizzled;  // columns in bytes
};

struct Flight {
    Block *to;
    unsigned address, barrier;  // in the block `to`
    Map map;
    int column, row;  // column in bytes
    std::vector<Copy> copies;  // of cp.async, instead of a box
    Thread *by;
    uintptr_t site;
    std::vector<unsigned char> stored;  // by st.async, instead of a box
};
std::vector<std::unique_ptr<Flight>> flights;  // pointers: hundreds of copies may be in flight, and land in any order

unsigned swizzled(unsigned address, long long row_bytes) {
    return address ^ (address >> 7 & (static_cast<unsigned>(row_bytes) / 16 - 1)) << 4;
}

// Visits a box in parts of up to 16 bytes: addresses in shared memory and in the tensor, and bytes inside the tensor.
template <class Visit>
void each_part(const Map &map, unsigned address, int column, int row, const Visit &visit) {
    for (long long i = 0; i < map.box_rows; i++)
        for (long long j = 0; j < map.box_columns; j += 16) {
            unsigned at = address + static_cast<unsigned>(i * map.box_columns + j);
            if (map.swizzled) at = swizzled(at, map.box_columns);
            const bool inside = row + i >= 0 && row + i < map.rows && column + j >= 0;
            const long long left = inside ? std::min(16ll, map.columns - (column + j)) : 0;
            visit(at, map.memory + (row + i) * map.stride + column + j, std::max(left, 0ll));
        }
}

// Marks bytes into which the current thread starts a copy: like a write by the thread, but by another proxy.
void begin_write(Block &block, size_t index, size_t bytes, uintptr_t site, bool proxy) {
    check_async_reads(block, index, bytes, site);
    for (size_t i = 0, n; i < bytes; i += n) {
        Cell *const cells = &block.cells[index + i];
        const Cell &cell = *cells;
        n = alike(cells, bytes - i);
        if (cell.written >= block.first_epoch) {
            if (cell.writer == IN_FLIGHT) fail(site, "copies into shared memory where another copy is under way");
            if (cell.writer == MBARRIER) fail(site, "copies into an mbarrier");
            if (!known(block, cell.writer, cell.written))
                fail(site, "race on shared memory: copies over what another thread wrote since the last barrier");
            if (proxy && !known_to_proxy(block, cell.writer, cell.written))
                fail(site, "TMA writes what thread %u wrote: no fence.proxy.async stands between", cell.writer);
        }
        const int reader = proxy && launch->reads_need_fences ? reader_without_fence(block, cell) : -1;
        if (!reads_known(block, cells, n))
            fail(site, "race on shared memory: copies over what another thread read since the last barrier");
        if (reader >= 0) fail(site, "TMA writes what thread %d read: no fence.proxy.async stands between", reader);
        for (size_t j = 0; j < n; j++) {
            cells[j].writer = IN_FLIGHT;
            cells[j].written = now;
        }
    }
    memset(memory_at(block, index), POISON, bytes);
}

void end_write(Block &block, size_t index, size_t bytes, uint16_t slot) {
    const uint32_t written = now;
    for (Cell *cell = &block.cells[index], *end = cell + bytes; cell != end; cell++) {
        cell->writer = slot;
        cell->written = written;
    }
}

void land(size_t which) {
    const std::unique_ptr<Flight> landing = std::move(flights[which]);
    const Flight &f = *landing;
    flights.erase(flights.begin() + static_cast<long>(which));
    Barrier *barrier = nullptr;
    for (Barrier &b : f.to->barriers)
        if (b.address == f.barrier) barrier = &b;
    long bytes = 0;
    if (!f.stored.empty()) {
        const size_t index = shared_index(f.address);
        memcpy(memory_at(*f.to, index), f.stored.data(), f.stored.size());
        end_write(*f.to, index, f.stored.size(), barrier->slot);
        bytes = static_cast<long>(f.stored.size());
    } else if (f.copies.empty()) {
        each_part(f.map, f.address, f.column, f.row, [&](unsigned at, long long from, long long inside) {
            unsigned char part[16] = {};
            memcpy(part, reinterpret_cast<const void *>(from), static_cast<size_t>(inside));
            const size_t index = shared_index(at), length = static_cast<size_t>(std::min(16ll, f.map.box_columns));
            memcpy(memory_at(*f.to, index), part, length);
            end_write(*f.to, index, length, barrier->slot);
            bytes += static_cast<long>(length);
        });
    }
    for (const Copy &c : f.copies) {
        memcpy(memory_at(*f.to, c.to), c.from, 4);
        end_write(*f.to, c.to, 4, barrier->slot);
    }
    count_bytes(*f.to, *barrier, bytes, bytes == 0, f.site);
}

void take_off(Flight flight) {
    flights.push_back(std::make_unique<Flight>(std::move(flight)));
    if (launch->schedule.landing == EMULATED_AT_ONCE) land(flights.size() - 1);
}

bool land_one() {
    if (flights.empty()) return false;
    // Copies land in any order: the last issued may land first.
    land(draw() % flights.size());
    return true;
}

// Marks shared memory as being read until the current thread awaits the read.
void begin_read(size_t begin, size_t end, const char *what, uint32_t group) {
    Block &block = *current->block;
    block.reads_low = std::min(block.reads_low, begin);
    block.reads_high = std::max(block.reads_high, end);
    for (AsyncRead &r : block.reads)
        if (r.by == current && begin <= r.begin && r.end <= end) {
            r = {begin, end, current, what, group, 0};
            return;
        }
    block.reads.push_back({begin, end, current, what, group, 0});
}
void end_reads(const char *what, uint32_t group) {
    for (AsyncRead &r : current->block->reads)
        if (r.by == current && r.what == what && !r.done && r.group <= group) r.done = now;
}

// Reports bytes that TMA or the tensor cores may not read yet.
void check_proxy_read(const Block &block, size_t index, size_t bytes, bool loose, const char *what, uintptr_t site) {
    const auto same = [&](const Cell &x, const Cell &y) { return x.written == y.written && x.writer == y.writer; };
    for (size_t i = 0; i < bytes; i++) {
        const Cell &cell = block.cells[index + i];
        if (i && same(cell, (&cell)[-1])) continue;
        if (cell.written < block.first_epoch) {
            if (!loose) fail(site, "%s reads shared memory that nobody wrote", what);
        } else if (cell.writer == IN_FLIGHT) {
            fail(site, "%s reads shared memory into which a copy is under way", what);
        } else if (!known(block, cell.writer, cell.written)) {
            fail(site, "race on shared memory: %s reads what was written since the last barrier", what);
        } else if (!known_to_proxy(block, cell.writer, cell.written)) {
            fail(site, "%s reads what thread %u wrote: no fence.proxy.async stands between", what, cell.writer);
        }
    }
}

constexpr const char *STORE = "a store of TMA";

void read_store(Store &s) {
    const Map &map = *reinterpret_cast<const Map *>(s.map);
    each_part(map, s.from, s.column, s.row, [&](unsigned at, long long to, long long inside) {
        const SharedPlace from = place_at(at, 16, current->site, STORE);
        memcpy(reinterpret_cast<void *>(to), memory_at(*from.block, from.index), static_cast<size_t>(inside));
    });
    s.read = true;
}

// Reports asynchronous operations that are not awaited when a thread returns, or when blocks end.
void check_return() {
    const Thread &t = *current;
    if (!t.issued.empty()) fail(t.site, "returns while products are under way");
    if (!t.storing.empty()) fail(t.site, "returns while stores of TMA read its shared memory");
    if (!t.copies.empty()) fail(t.site, "returns with copies that nothing counts");
}
void check_end() {
    if (!flights.empty()) fail(flights[0]->site, "the block ends before this copy into its shared memory is awaited");
    check_named_barriers();
}

}  // namespace

extern "C" {

void emulation_tile_load(unsigned to, const void *given, int column, int row, unsigned barrier, int to_blocks) {
    enter(SITE);
    const Map &map = *static_cast<const Map *>(given);
    column *= static_cast<int>(map.item);
    if (to % 128 || to >= OF_BLOCK) fail(SITE, "TMA loads to %#x, which is no multiple of 128 of this block", to);
    if (column % 16) fail(SITE, "TMA loads from byte %d of rows, which is no multiple of 16: an illegal instruction on an H200", column);
    each_part(map, to, column, row, [&](unsigned, long long from, long long inside) {
        if (inside) check_global(static_cast<uintptr_t>(from), static_cast<size_t>(inside), READ, SITE);
    });
    const unsigned self = static_cast<unsigned>(current->block - &blocks[0]);
    for (unsigned rank = 0; rank < blocks.size(); rank++) {
        if (to_blocks ? !(to_blocks >> rank & 1) : rank != self) continue;
        const unsigned other = (rank + 1) * OF_BLOCK;
        const size_t bytes = static_cast<size_t>(map.box_rows * map.box_columns);
        const SharedPlace at = place_at(other + to, bytes, SITE, "TMA loads");
        if (!barrier_at(other + barrier, SITE).fenced) fail(SITE, "TMA counts at an mbarrier whose initialization was not fenced");
        begin_write(*at.block, at.index, bytes, SITE, true);
        take_off({at.block, to, barrier, map, column, row, {}, current, SITE});
    }
    if (to_blocks >= 1 << blocks.size()) fail(SITE, "TMA loads to blocks %#x of a cluster of %zu", to_blocks, blocks.size());
    give_way();
}

void emulation_tile_store(const void *given, unsigned from, int column, int row) {
    Thread &self = *current;
    enter(SITE);
    const Map &map = *static_cast<const Map *>(given);
    if (from % 128) fail(SITE, "TMA stores from %#x, which is no multiple of 128", from);
    const size_t bytes = static_cast<size_t>(map.box_rows * map.box_columns);
    const SharedPlace at = place_at(from, bytes, SITE, STORE);
    each_part(map, from, column, row, [&](unsigned place, long long to, long long inside) {
        if (inside) check_global(static_cast<uintptr_t>(to), static_cast<size_t>(inside), WRITE, SITE);
        if (inside) check_proxy_read(*at.block, place_at(place, 16, SITE, STORE).index, static_cast<size_t>(inside), false, STORE, SITE);
    });
    begin_read(at.index, at.index + bytes, STORE, self.stores + 1);
    self.storing.push_back({static_cast<const long long *>(given), from, column, row, self.stores + 1, false});
    if (launch->schedule.landing == EMULATED_AT_ONCE) read_store(self.storing.back());
}
void emulation_stores_commit() {
    current->stores++;
    give_way();
}
void emulation_stores_read(int pending) {
    Thread &self = *current;
    self.site = SITE;
    give_way();
    if (static_cast<int64_t>(self.stores) <= pending) return;
    const uint32_t group = self.stores - static_cast<uint32_t>(pending);
    while (!self.storing.empty() && self.storing.front().group <= group) {
        if (!self.storing.front().read) read_store(self.storing.front());
        self.storing.erase(self.storing.begin());
    }
    end_reads(STORE, group);
}

void emulation_proxy_fence() {
    if (overwrite.bytes) check_overwrite();
    if (!clocked) return;
    publish(*current);
    join(current->clock.fenced, current->clock.known);
    join(current->clock.used, current->clock.known);
}

void emulation_cp_async_word(unsigned to, const void *from) {
    const SharedPlace at = place_at(to, 4, SITE, "cp.async");
    if (to % 4) fail(SITE, "cp.async to %#x, which is no multiple of 4", to);
    check_global(reinterpret_cast<uintptr_t>(from), 4, READ, SITE);
    begin_write(*at.block, at.index, 4, SITE, false);
    current->copies.push_back({at.index, static_cast<const unsigned char *>(from)});
}
void emulation_cp_async_arrive(unsigned barrier) {
    current->site = SITE;
    barrier_at(barrier, SITE);
    take_off({current->block, 0, barrier, {}, 0, 0, std::move(current->copies), current, SITE});
    current->copies.clear();
    give_way();
}
void emulation_remote_store(unsigned to, const void *values, int bytes, unsigned barrier) {
    enter(SITE);
    if (to % static_cast<unsigned>(bytes)) fail(SITE, "st.async of %d bytes to %#x, which is no multiple", bytes, to);
    if (to / OF_BLOCK != barrier / OF_BLOCK) fail(SITE, "st.async into one block that is counted in another");
    const SharedPlace at = place_at(to, static_cast<size_t>(bytes), SITE, "st.async");
    const Barrier &b = barrier_at(barrier, SITE);
    if (at.block != current->block && !b.fenced) fail(SITE, "st.async counts at an mbarrier whose initialization was not fenced");
    begin_write(*at.block, at.index, static_cast<size_t>(bytes), SITE, false);
    const auto *from = static_cast<const unsigned char *>(values);
    take_off({at.block, to % OF_BLOCK, barrier % OF_BLOCK, {}, 0, 0, {}, current, SITE, {from, from + bytes}});
    give_way();
}
// Awaits the cp.async copies of the current thread.
void emulation_cp_async_wait_all() {
    if (!current->copies.empty()) fail(SITE, "waits for words that no mbarrier counts");
    for (size_t i = flights.size(); i-- > 0;)
        if (flights[i]->by == current && !flights[i]->copies.empty()) land(i);
}

}  // extern "C"
