// What the engine knows of the launch under way, and how it ends one that is wrong.
#pragma once
#include "engine.h"
#include "fibers.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace {

constexpr size_t STACK = 96 << 10;
constexpr size_t GUARD = 64 << 10;  // past the dynamic shared memory: what is touched there is reported
constexpr unsigned char POISON = 0xFF;
constexpr uint16_t NOBODY = 0xFFFF, ATOMIC = 0xFFFE;

struct Variable {
    uintptr_t address;
    size_t bytes, padded;
    std::string name;
};

// What is known of one byte of shared memory.
struct Cell {
    uint32_t write_epoch, write_sync;
    uint32_t read_epoch, read_sync;
    uint16_t writer, reader, reader_warp;
    bool many_warps;
};

enum Wait : uint8_t { RUNNABLE, AT_BARRIER, AT_COLLECTIVE, EXITED };

struct Warp {
    uint64_t lanes, exited, waiting;
    uint32_t sync;
    struct Thread *first;
};

struct Block {
    unsigned threads, arrived, exited, votes;
    unsigned bytes_awaited, bytes_received, cluster_arrived;  // bytes, bytes, threads
    uint32_t first_epoch, epoch;
    unsigned result;
    std::vector<Warp> warps;
    std::vector<Cell> cells;
    std::vector<unsigned char> shared;  // while another block of a cooperative grid runs
    struct Thread *first;
};

struct Thread {
    EmulatedThread known;
    void *stack_pointer;
    Block *block;
    Warp *warp;
    unsigned index;
    uint16_t number;
    Wait wait;
    EmulatedCollective kind;
    uint64_t mask, value, result;
    unsigned source;
    uintptr_t site;
};

struct Segment {
    uintptr_t low, high;
};

struct Image {
    std::vector<Segment> segments;
    std::vector<Variable> shared;
    uintptr_t low, high;  // of the shared variables
};

std::vector<Variable> registered;
std::map<void *, Image> images;

// The launch under way.
EmulatedLaunch *launch;
Image *image;
std::vector<Thread> threads;
std::vector<Block> blocks;
Thread *current;
Block *loaded;
unsigned exited;
uint32_t epoch;
uint64_t idle;
bool failed;
void *main_pointer;
unsigned char *stacks;
size_t stacks_count;
unsigned char *dynamic_memory;
size_t dynamic_capacity;
size_t last_array;

[[noreturn]] void leave() {
    void *unused;
    emulation_switch(&unused, main_pointer);
    __builtin_unreachable();
}

std::string where(const Thread &t) {
    char text[96];
    snprintf(text, sizeof text, "block (%u, %u, %u), thread (%u, %u, %u)", t.known.block.x, t.known.block.y,
             t.known.block.z, t.known.thread.x, t.known.thread.y, t.known.thread.z);
    return text;
}

__attribute__((format(printf, 2, 3))) [[noreturn]] void fail(uintptr_t site, const char *format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    snprintf(launch->report, launch->report_bytes, "%s: %s", where(*current).c_str(), text);
    launch->site = site;
    failed = true;
    leave();
}

#define SITE reinterpret_cast<uintptr_t>(__builtin_return_address(0))

}  // namespace
