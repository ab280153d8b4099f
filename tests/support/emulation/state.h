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
// In the place of a thread's number in its block: who wrote or read. From BY_BARRIER on: a copy that this mbarrier counts.
constexpr uint16_t NOBODY = 0xFFFF, ATOMIC = 0xFFFE, IN_FLIGHT = 0xFFFD, MANY = 0xFFFC, MBARRIER = 0xFFFB, BY_BARRIER = 0x8000;
constexpr size_t MOST_BARRIERS = 128;  // mbarriers of a block

struct Variable {
    uintptr_t address;
    size_t bytes, padded;
    std::string name;
};

// What is known of one byte of shared memory: who accessed it last, and when. Time is `now`, which counts what orders.
struct Cell {
    uint32_t written, read;
    uint16_t writer, reader;
    uint32_t readers;  // of MANY: their place in Block::readers, or without clocks their warp
};

enum Wait : uint8_t { RUNNABLE, AT_BARRIER, AT_COLLECTIVE, AT_MBARRIER, AT_NAMED, AT_CLUSTER, EXITED };

struct Warp {
    uint64_t lanes, exited, waiting;
    uint32_t synced;  // when its last __syncwarp was
    struct Thread *first;
};

// A vector clock: until when the accesses of each thread, and of the copies of each mbarrier, are known; of those, which a
// proxy fence has shown to TMA and the tensor cores; and which reads are over, as what was read went through the tensor cores.
struct Clock {
    std::vector<int32_t> known, fenced, used;
};

struct Barrier {
    unsigned address;
    int expected, left;
    long bytes;
    uint32_t phase;  // phases that are complete
    bool fenced;     // whether other proxies and blocks see that it is initialized
    uint16_t slot;
    struct Thread *initializer;
    Clock arriving, passed;  // of the phase under way, of the last that is complete
};

struct Named {
    unsigned threads, arrived;
    std::vector<bool> who;  // has arrived
    Clock arriving;
};

// Bytes of shared memory that a product or a store of TMA reads.
struct AsyncRead {
    size_t begin, end;
    struct Thread *by;
    const char *what;
    uint32_t group, done;  // the group of the thread that it is of; when it was awaited, 0: not yet
};

struct Block {
    unsigned threads, arrived, exited, votes;
    uint32_t first_epoch, epoch;                              // times of its start and of its last barrier
    std::vector<Warp> warps;
    std::vector<Cell> cells;
    std::vector<std::vector<int32_t>> readers;  // when each thread read a byte that many did
    std::vector<uint32_t> free_readers;
    std::vector<unsigned char> shared;  // its shared variables, while another block runs
    unsigned char *dynamic;
    std::vector<Barrier> barriers;
    Named named[16];
    std::vector<AsyncRead> reads;
    size_t reads_low, reads_high;  // all of them are between
    struct Thread *first;
};

// Sums in registers that products are multiplied into: they are poisoned until these are awaited.
struct Sums {
    float *at;
    std::vector<float> value;
    unsigned pending;
};
struct Product {
    float *into;
    unsigned a, b;
    int a_format, b_format, keep;
    uint32_t group;
    const unsigned *w;    // registers in the place of a, or null: they may not change until the product is awaited
    uint32_t began;       // of a product of registers: when it was issued
    unsigned held[4];     // what they were
    unsigned char rows[2][32];
};
struct Copy {  // by cp.async
    size_t to;
    const unsigned char *from;
};
struct Store {  // by TMA
    const long long *map;
    unsigned from;
    int column, row;
    uint32_t group;
    bool read;
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
    Clock clock;
    Barrier *awaited;  // AT_MBARRIER, and until it runs again
    unsigned cluster_rounds;  // how often it arrived at the cluster's barrier
    bool cluster_waited;      // ever
    bool products_fenced;
    uint32_t products, stores;  // groups that were committed
    std::vector<Product> issued;
    std::vector<Sums> sums;
    std::vector<Copy> copies;
    std::vector<Store> storing;
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
unsigned exited, cluster_rounds, missing;  // rounds of the cluster's barrier; threads that the one under way lacks
uint32_t now;
bool clocked;  // from the first mbarrier on, threads have clocks
uint64_t idle;
bool failed;
void *main_pointer;
unsigned char *stacks;
size_t stacks_count;
unsigned char *dynamic_memory;
size_t dynamic_capacity, dynamic_stride;  // of all blocks, of one
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
