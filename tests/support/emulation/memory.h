// Every access of a kernel is checked here: against the shared variables and the arrays of the launch, and on shared
// memory for reads of what nobody wrote and for races between barriers. GCC leaves out a check of what the same thread
// checked just before, so a race may be missed; none is reported that is not there.
#pragma once
#include "state.h"

#include <algorithm>
#include <dlfcn.h>
#include <link.h>

namespace {

// A write over what another thread wrote since the last barrier: the hook comes before the write.
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

size_t shared_length() { return (image->high - image->low) + launch->shared_bytes; }


const Variable *shared_variable(uintptr_t address) {
    const Variable *before = nullptr;
    for (const Variable &v : image->shared)
        if (v.address <= address && (!before || v.address > before->address)) before = &v;
    return before;
}

// Whether a __syncwarp stands between what `other` did at its warp's count `sync` and now.
bool ordered(uint16_t other, uint32_t sync) {
    return other < ATOMIC && other / launch->warp == current->number / launch->warp && sync < current->warp->sync;
}

enum Access { READ, WRITE, UPDATE };

void check_shared(unsigned char *memory, size_t offset, size_t index, size_t bytes, Access access, uintptr_t site,
                  const char *name) {
    Block &block = *current->block;
    uint32_t now = block.epoch;
    uint16_t self = access == UPDATE ? ATOMIC : current->number;
    auto warp = static_cast<uint16_t>(current->number / launch->warp);
    for (size_t i = 0; i < bytes; i++) {
        Cell &cell = block.cells[index + i];
        if (access != WRITE && cell.write_epoch < block.first_epoch)
            fail(site, "%s of shared %s at byte %zu, which nobody wrote", access == READ ? "read" : "atomic update", name,
                 offset + i);
        bool other_writer = cell.write_epoch == now && cell.writer != self && !ordered(cell.writer, cell.write_sync);
        if (other_writer && access == WRITE) {
            overwrite.bytes = bytes;  // allowed if it turns out to write the same
            overwrite.name = name;
            overwrite.site = site;
            overwrite.where = memory;
            memcpy(overwrite.before, memory, bytes);
        } else if (other_writer) {
            fail(site, "race on shared %s at byte %zu: %s what another thread wrote since the last barrier", name, offset + i,
                 access == READ ? "reads" : "updates");
        }
        if (access == READ) {
            if (cell.read_epoch != now) {
                cell.read_epoch = now;
                cell.reader = current->number;
                cell.reader_warp = warp;
                cell.many_warps = false;
            } else if (cell.reader != current->number) {
                cell.reader = NOBODY;
                cell.many_warps |= cell.reader_warp != warp;
            }
            cell.read_sync = current->warp->sync;
        } else {
            bool other_reader = cell.read_epoch == now && cell.reader != current->number;
            bool in_order = !cell.many_warps && cell.reader_warp == warp && cell.read_sync < current->warp->sync;
            if (other_reader && !in_order)
                fail(site, "race on shared %s at byte %zu: overwrites what another thread read since the last barrier",
                     name, offset + i);
            cell.write_epoch = now;
            cell.write_sync = current->warp->sync;
            cell.writer = self;
        }
    }
}

void check(uintptr_t address, size_t bytes, Access access, bool aligned, uintptr_t site) {
    if (!current) return;  // the host's own start-up code
    if (overwrite.bytes) check_overwrite();
    uintptr_t stack = reinterpret_cast<uintptr_t>(stacks) + current->index * STACK;
    if (address - stack < STACK || address - reinterpret_cast<uintptr_t>(&current->known) < sizeof current->known) return;
    if (aligned && address % bytes)
        fail(site, "misaligned %s of %zu bytes at %#zx", access == READ ? "read" : "write", bytes, address);
    uintptr_t dynamic = reinterpret_cast<uintptr_t>(dynamic_memory);
    size_t statics = image->high - image->low;
    if (address - dynamic < dynamic_capacity) {
        size_t offset = address - dynamic;
        if (offset + bytes > launch->shared_bytes)
            fail(site, "%s of %zu bytes at byte %zu of dynamic shared memory, which has %u",
                 access == READ ? "read" : "write", bytes, offset, launch->shared_bytes);
        check_shared(dynamic_memory + offset, offset, statics + offset, bytes, access, site, "dynamic memory");
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
    // Name the nearest array below.
    long nearest = -1;
    for (int i = 0; i < launch->array_count; i++)
        if (arrays[i].address <= address && (nearest < 0 || arrays[i].address > arrays[nearest].address)) nearest = i;
    if (nearest < 0) fail(site, "%s of %zu bytes at %#zx, in no array of the launch", access == READ ? "read" : "write", bytes, address);
    fail(site, "%s of %zu bytes at byte %zu of argument array %ld, which has %llu", access == READ ? "read" : "write", bytes,
         static_cast<size_t>(address - arrays[nearest].address), nearest,
         static_cast<unsigned long long>(arrays[nearest].bytes));
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
