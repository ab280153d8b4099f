// The state of the current launch, and how the engine ends a faulty one.
#pragma once
#include "engine.h"
#include "fibers.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace {

constexpr size_t STACK = 96 << 10;
constexpr size_t GUARD = 64 << 10;  // bytes after the dynamic shared memory, where any access is reported
constexpr unsigned char POISON = 0xFF;
// Writers and readers beside the numbers of the block's threads. From BY_BARRIER on: a copy that this mbarrier counts.
constexpr uint16_t NOBODY = 0xFFFF, ATOMIC = 0xFFFE, IN_FLIGHT = 0xFFFD, MANY = 0xFFFC, MBARRIER = 0xFFFB, BY_BARRIER = 0x8000;
constexpr size_t MOST_BARRIERS = 128;  // mbarriers per block

struct Variable {
    uintptr_t address;
    size_t bytes, padded;
    std::string name;
};

// The last accesses of one byte of shared memory: by whom, and when. Time is `now`: it counts ordering events. Neighbours
// with the same history are checked and noted together.
struct Cell {
    uint32_t written, read;
    uint16_t writer, reader;
    uint32_t readers;  // for MANY: the place in Block::readers; without clocks: the readers' warp
};

// The times at which each thread read bytes that several read, or 0; and the number of cells that have these times.
struct Readers {
    std::vector<int32_t> times;
    size_t cells;
};

enum Wait : uint8_t { RUNNABLE, AT_BARRIER, AT_COLLECTIVE, AT_MBARRIER, AT_NAMED, AT_CLUSTER, EXITED };

struct Warp {
    uint64_t lanes, exited, waiting;
    uint32_t synced;  // the time of its last __syncwarp
    struct Thread *first;
};

// A vector clock, indexed by thread and by mbarrier (for its copies). known: the time up to which accesses are known;
// fenced: up to which a proxy fence has shown them to TMA and the tensor cores; used: up to which reads are complete,
// as a proxy fence followed them, or as the tensor cores have used the registers that were read.
struct Clock {
    std::vector<int32_t> known, fenced, used;
};

struct Barrier {
    unsigned address;
    int expected, left;
    long bytes;
    uint32_t phase;  // the number of completed phases
    bool fenced;     // whether its initialization is visible to other proxies and blocks
    uint16_t slot;
    struct Thread *initializer;
    Clock arriving, passed;  // the clocks of the current phase and of the last completed one
    std::map<uint32_t, int32_t> from_peers;  // when each thread of another block arrived last
};

struct Named {
    unsigned threads, arrived;
    std::vector<bool> who;  // the threads that have arrived
    Clock arriving;
};

// Bytes of shared memory that a product or a TMA store reads.
struct AsyncRead {
    size_t begin, end;
    struct Thread *by;
    const char *what;
    uint32_t group, done;  // its group, by the count of its thread; the time when it was awaited, or 0 if it is not yet
};

struct Block {
    unsigned threads, arrived, exited, votes;
    uint32_t first_epoch, epoch;                              // the times of its start and of its last barrier
    std::vector<Warp> warps;
    std::vector<Cell> cells;
    std::vector<Readers> readers;
    std::vector<uint32_t> free_readers;
    std::vector<unsigned char> shared;  // the content of its shared variables while another block runs
    unsigned char *dynamic;
    std::vector<Barrier> barriers;
    Named named[16];
    std::vector<AsyncRead> reads;
    size_t reads_low, reads_high;  // all reads are within these bounds
    struct Thread *first;
};

// Sums in registers to which products are added: they are poisoned until the products are awaited.
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
    const unsigned *w;    // registers instead of a, or null: they may not change until the product is awaited
    uint32_t began;       // for a product of registers: the time of its issue
    unsigned held[4];     // the content of w at the issue
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
    Barrier *awaited;  // set from AT_MBARRIER until the thread runs again
    unsigned cluster_rounds;  // the number of its arrivals at the cluster's barrier
    bool cluster_waited;      // whether it has ever waited at that barrier
    bool products_fenced;
    uint32_t products, stores;  // the number of committed groups
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
    uintptr_t low, high;  // the bounds of the shared variables
};

std::vector<Variable> registered;
std::map<void *, Image> images;

// The current launch.
EmulatedLaunch *launch;
Image *image;
std::vector<Thread> threads;
std::vector<Block> blocks;
Thread *current;
Block *loaded;
unsigned exited, cluster_rounds, missing;  // rounds of the cluster's barrier; threads missing in the current one
uint32_t now;
bool clocked;  // threads have clocks: set by the first mbarrier
uint64_t idle;
bool failed;
void *main_pointer;
unsigned char *stacks;
size_t stacks_count;
unsigned char *dynamic_memory;
size_t dynamic_capacity, dynamic_stride;  // bytes of all blocks, and of one
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
