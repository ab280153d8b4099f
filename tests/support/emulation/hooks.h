// The hooks that the compiler's instrumentation of kernels calls.
#pragma once
#include "memory.h"

extern "C" {

struct SanitizedGlobal {
    uintptr_t address, bytes, padded;
    const char *name, *module;
    uintptr_t dynamic_init;
    void *location;
    uintptr_t indicator;
};

void __asan_register_globals(SanitizedGlobal *globals, size_t count) {
    for (size_t i = 0; i < count; i++) {
        // translating.py declares a shared x as x_emulated_shared; other variables are not shared.
        std::string name = globals[i].name, mark = "_emulated_shared";
        if (name.size() <= mark.size() || name.compare(name.size() - mark.size(), mark.size(), mark)) continue;
        name.resize(name.size() - mark.size());
        registered.push_back({globals[i].address, globals[i].bytes, globals[i].padded, name});
    }
}
void __asan_unregister_globals(SanitizedGlobal *, size_t) {}
void __asan_handle_no_return() {}

// ---- -fsanitize=alignment, bounds, shift, ... call these: each record begins with the place in the source

struct Place {
    const char *file;
    uint32_t line, column;
};

#define UNDEFINED(name, ...)                                                                                        \
    void __ubsan_handle_##name##_abort(Place *place, __VA_ARGS__) {                                                 \
        fail(0, "undefined behaviour (" #name ")\n  at %s:%u:%u", place->file, place->line, place->column);         \
    }
UNDEFINED(type_mismatch_v1, uintptr_t)
UNDEFINED(out_of_bounds, uintptr_t)
UNDEFINED(shift_out_of_bounds, uintptr_t, uintptr_t)
UNDEFINED(add_overflow, uintptr_t, uintptr_t)
UNDEFINED(sub_overflow, uintptr_t, uintptr_t)
UNDEFINED(mul_overflow, uintptr_t, uintptr_t)
UNDEFINED(divrem_overflow, uintptr_t, uintptr_t)
UNDEFINED(negate_overflow, uintptr_t)
void __ubsan_handle_builtin_unreachable(Place *place) {
    fail(0, "a place that is never reached was\n  at %s:%u", place->file, place->line);
}

#define HOOKS(bytes)                                                                                                \
    void __asan_load##bytes##_noabort(uintptr_t address) { check(address, bytes, READ, true, SITE); }               \
    void __asan_store##bytes##_noabort(uintptr_t address) { check(address, bytes, WRITE, true, SITE); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __asan_loadN_noabort(uintptr_t address, size_t bytes) { check(address, bytes, READ, false, SITE); }
void __asan_storeN_noabort(uintptr_t address, size_t bytes) { check(address, bytes, WRITE, false, SITE); }
}  // extern "C"
