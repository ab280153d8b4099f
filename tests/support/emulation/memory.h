// Checks every access of a kernel: its bounds, against the shared variables and the arrays of the launch; and on shared
// memory reads of uninitialized bytes, and races. GCC omits the check of an address that the same thread has checked
// just before, so a race may be missed; but every reported race is real.
#pragma once
#include "clocks.h"

#include <algorithm>
#include <dlfcn.h>
#include <link.h>

namespace {

// A write over another thread's write since the last barrier. It is checked later, as the hook runs before the write.
struct Overwrite {
    size_t bytes;
    const char *name;
    uintptr_t site;
    unsigned char *where;
    unsigned char before[64];
} overwrite;

void check_overwrite() {
    size_t bytes = overwrite.bytes;
    overwrite.bytes = 0;
    if (memcmp(overwrite.where, overwrite.before, bytes))
        fail(overwrite.site, "race on shared %s: two threads write different values without a barrier between", overwrite.name);
}

// Every function of the emulation in which a thread may wait begins with this.
void enter(uintptr_t site) {
    current->site = site;
    if (overwrite.bytes) check_overwrite();
}

size_t shared_length() { return (image->high - image->low) + launch->shared_bytes; }

const Variable *shared_variable(uintptr_t address) {
    const Variable *before = nullptr;
    for (const Variable &v : image->shared)
        if (v.address <= address && (!before || v.address > before->address)) before = &v;
    return before;
}

enum Access { READ, WRITE, UPDATE, LOOSE_READ };  // LOOSE_READ may read uninitialized bytes

// Returns how many of the cells, up to `most`, have the history of the first.
size_t alike(const Cell *cells, size_t most) {
    size_t n = 1;
    while (n < most && !memcmp(&cells[n], cells, sizeof(Cell))) n++;
    return n;
}

void release_readers(Block &block, uint32_t place, size_t n) {
    if (!(block.readers[place].cells -= n)) block.free_readers.push_back(place);
}

// Returns the times at which the threads of a block read bytes that several threads read: `n` cells like this one, which
// have the times for themselves.
std::vector<int32_t> &times_of_readers(Block &block, Cell &cell, size_t n) {
    if (cell.reader == MANY && block.readers[cell.readers].cells == n) return block.readers[cell.readers].times;
    if (block.free_readers.empty()) {
        block.free_readers.push_back(static_cast<uint32_t>(block.readers.size()));
        block.readers.emplace_back();
    }
    const uint32_t place = block.free_readers.back();
    block.free_readers.pop_back();
    Readers &own = block.readers[place];
    own.cells = n;
    if (cell.reader == MANY) {
        own.times = block.readers[cell.readers].times;
        release_readers(block, cell.readers, n);
    } else {
        own.times.assign(block.threads, 0);
        own.times[cell.reader] = static_cast<int32_t>(cell.read);
    }
    cell.reader = MANY;
    cell.readers = place;
    return own.times;
}

// The current thread reads `n` bytes with the same history.
void note_read(Block &block, Cell *cells, size_t n) {
    const Thread &self = *current;
    Cell cell = *cells;
    if (cell.read < (cell.reader == MANY ? block.first_epoch : block.epoch)) cell.reader = self.number;
    if (cell.reader != self.number && clocked) {
        times_of_readers(block, cell, n)[self.number] = static_cast<int32_t>(now);
    } else if (cell.reader != self.number) {
        const uint32_t warp = self.number / launch->warp;
        if (cell.reader != NOBODY) cell.readers = cell.reader / launch->warp;
        if (cell.readers != warp) cell.readers = ~0u;
        cell.reader = NOBODY;
    }
    cell.read = now;
    std::fill_n(cells, n, cell);
}

// The current thread has TMA write a byte. Returns a thread that read it and since then, as far as the current thread
// knows, has neither had a fence.proxy.async nor awaited a product of its registers; or -1.
int reader_without_fence(const Block &block, const Cell &cell) {
    if (cell.read < block.first_epoch || cell.reader == NOBODY) return -1;
    const auto over = [&](unsigned who, int32_t when) {
        return current->clock.used[clock_index(block, static_cast<uint16_t>(who))] >= when;
    };
    if (cell.reader != MANY) return over(cell.reader, static_cast<int32_t>(cell.read)) ? -1 : cell.reader;
    const std::vector<int32_t> &times = block.readers[cell.readers].times;
    if (none_later(times.data(), &current->clock.used[block.first->index], block.threads)) return -1;
    for (unsigned i = 0; i < block.threads; i++)
        if (times[i] && !over(i, times[i])) return static_cast<int>(i);
    return -1;
}

// Whether all reads of `n` bytes with the same history happened before the current thread's access.
bool reads_known(Block &block, Cell *cells, size_t n) {
    const Cell &cell = *cells;
    if (cell.read < block.first_epoch) return true;
    if (cell.reader == MANY) {
        const std::vector<int32_t> &times = block.readers[cell.readers].times;
        if (!none_later(times.data(), &current->clock.known[block.first->index], block.threads))
            for (unsigned i = 0; i < block.threads; i++)
                if (times[i] && !known(block, static_cast<uint16_t>(i), static_cast<uint32_t>(times[i]))) return false;
        release_readers(block, cell.readers, n);
        for (size_t i = 0; i < n; i++) {
            cells[i].reader = current->number;
            cells[i].read = 0;
        }
        return true;
    }
    if (&block == current->block && cell.read < block.epoch) return true;
    if (cell.reader == NOBODY) return cell.readers == current->number / launch->warp && cell.read < current->warp->synced;
    return known(block, cell.reader, cell.read);
}

// Reports products and TMA stores that read these bytes and were not awaited before; forgets those that were.
void check_async_reads(Block &block, size_t index, size_t bytes, uintptr_t site) {
    if (index >= block.reads_high || index + bytes <= block.reads_low) return;
    for (size_t i = 0; i < block.reads.size(); i++) {
        AsyncRead &r = block.reads[i];
        if (index >= r.end || index + bytes <= r.begin) continue;
        if (!r.done) fail(site, "overwrites shared memory that %s of thread %u still reads", r.what, r.by->number);
        if (!known(block, r.by->number, r.done))
            fail(site, "overwrites shared memory that %s of thread %u read: nothing tells that it was awaited", r.what, r.by->number);
        if (index <= r.begin) r.begin = std::min(index + bytes, r.end);
        else if (index + bytes >= r.end) r.end = index;
        if (r.begin == r.end) {
            r = block.reads.back();
            block.reads.pop_back();
            i--;
        }
    }
}

void check_shared(unsigned char *memory, size_t offset, size_t index, size_t bytes, Access access, uintptr_t site,
                  const char *name) {
    Block &block = *current->block;
    const bool reads = access == READ || access == LOOSE_READ;
    if (!reads) check_async_reads(block, index, bytes, site);
    for (size_t i = 0, n; i < bytes; i += n) {
        Cell *const cells = &block.cells[index + i];
        const Cell &cell = *cells;
        n = alike(cells, bytes - i);
        if (cell.written < block.first_epoch) {
            if (access == READ || access == UPDATE)
                fail(site, "%s of shared %s at byte %zu, which nobody wrote", reads ? "read" : "atomic update", name, offset + i);
        } else if (cell.writer == IN_FLIGHT) {
            fail(site, "%s shared %s at byte %zu, into which a copy is under way", reads ? "reads" : "writes", name, offset + i);
        } else if (cell.writer == MBARRIER) {
            fail(site, "%s shared %s at byte %zu, an mbarrier's", reads ? "reads" : "writes", name, offset + i);
        } else if ((access != UPDATE || cell.writer != ATOMIC) && !known(block, cell.writer, cell.written)) {
            if (access == WRITE) {
                overwrite = {bytes, name, site, memory};  // allowed if the written value is the same
                memcpy(overwrite.before, memory, bytes);
            } else {
                fail(site, "race on shared %s at byte %zu: %s what another thread wrote since the last barrier", name, offset + i,
                     reads ? "reads" : "updates");
            }
        }
        if (reads) {
            note_read(block, cells, n);
            continue;
        }
        if (!reads_known(block, cells, n))
            fail(site, "race on shared %s at byte %zu: overwrites what another thread read since the last barrier", name, offset + i);
        for (size_t j = 0; j < n; j++) {
            cells[j].written = now;
            cells[j].writer = access == UPDATE ? ATOMIC : current->number;
        }
    }
}

// Checks an access to global memory or to a constant of the kernel.
void check_global(uintptr_t address, size_t bytes, Access access, uintptr_t site) {
    if (!launch->array_count) return;
    const EmulatedArray *arrays = launch->arrays;
    for (int i = 0; i < launch->array_count; i++) {
        const EmulatedArray &a = arrays[last_array];
        if (address - a.address < a.bytes && address - a.address + bytes <= a.bytes) {
            if (access != READ && !a.writable) fail(site, "write to byte %zu of argument array %zu, which is an input",
                                                    static_cast<size_t>(address - a.address), last_array);
            return;
        }
        last_array = last_array + 1 == static_cast<size_t>(launch->array_count) ? 0 : last_array + 1;
    }
    for (const Segment &s : image->segments)
        if (address - s.low < s.high - s.low) return;
    // Report the nearest array at a lower address.
    long nearest = -1;
    for (int i = 0; i < launch->array_count; i++)
        if (arrays[i].address <= address && (nearest < 0 || arrays[i].address > arrays[nearest].address)) nearest = i;
    if (nearest < 0) fail(site, "%s of %zu bytes at %#zx, in no array of the launch", access == READ ? "read" : "write", bytes, address);
    fail(site, "%s of %zu bytes at byte %zu of argument array %ld, which has %llu", access == READ ? "read" : "write", bytes,
         static_cast<size_t>(address - arrays[nearest].address), nearest,
         static_cast<unsigned long long>(arrays[nearest].bytes));
}

void check(uintptr_t address, size_t bytes, Access access, bool aligned, uintptr_t site) {
    if (!current) return;  // start-up code on the host
    if (overwrite.bytes) check_overwrite();
    uintptr_t stack = reinterpret_cast<uintptr_t>(stacks) + current->index * STACK;
    if (address - stack < STACK || address - reinterpret_cast<uintptr_t>(&current->known) < sizeof current->known) return;
    if (aligned && address % bytes)
        fail(site, "misaligned %s of %zu bytes at %#zx", access == READ ? "read" : "write", bytes, address);
    uintptr_t dynamic = reinterpret_cast<uintptr_t>(current->block->dynamic);
    size_t statics = image->high - image->low;
    if (address - dynamic < dynamic_stride) {
        size_t offset = address - dynamic;
        if (offset + bytes > launch->shared_bytes)
            fail(site, "%s of %zu bytes at byte %zu of dynamic shared memory, which has %u",
                 access == READ ? "read" : "write", bytes, offset, launch->shared_bytes);
        check_shared(current->block->dynamic + offset, offset, statics + offset, bytes, access, site, "dynamic memory");
        return;
    }
    if (address - image->low < statics) {
        const Variable *v = shared_variable(address);
        size_t offset = address - v->address;
        if (offset + bytes > v->bytes)
            fail(site, "%s of %zu bytes at byte %zu of shared %s, which has %zu", access == READ ? "read" : "write", bytes,
                 offset, v->name.c_str(), v->bytes);
        check_shared(reinterpret_cast<unsigned char *>(address), offset, address - image->low, bytes, access, site, v->name.c_str());
        return;
    }
    check_global(address, bytes, access, site);
}

int find_segments(dl_phdr_info *info, size_t, void *found) {
    auto *target = static_cast<std::pair<uintptr_t, Image *> *>(found);
    std::vector<Segment> segments;
    bool here = false;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const auto &header = info->dlpi_phdr[i];
        if (header.p_type != PT_LOAD) continue;
        uintptr_t low = info->dlpi_addr + header.p_vaddr;
        segments.push_back({low, low + header.p_memsz});
        here |= target->first - low < header.p_memsz;
    }
    if (here) target->second->segments.insert(target->second->segments.end(), segments.begin(), segments.end());
    return 0;
}

Image &image_of(EmulatedLaunch &l) {
    void *key = reinterpret_cast<void *>(l.call);
    auto found = images.find(key);
    if (found != images.end()) return found->second;
    Image &made = images[key];
    std::pair<uintptr_t, Image *> kernel{reinterpret_cast<uintptr_t>(key), &made};
    dl_iterate_phdr(find_segments, &kernel);
    made.low = UINTPTR_MAX;
    made.high = 0;
    for (const Variable &v : registered)
        for (const Segment &s : made.segments)
            if (v.address - s.low < s.high - s.low) {
                made.shared.push_back(v);
                made.low = std::min(made.low, v.address);
                made.high = std::max(made.high, v.address + v.padded);
            }
    if (made.shared.empty()) made.low = made.high = 0;
    return made;
}

}  // namespace
