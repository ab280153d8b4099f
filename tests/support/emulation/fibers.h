// The switch between fibers, for x86-64 and AArch64.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
emulation_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
constexpr size_t SAVED = 6;
#elif defined(__aarch64__)
asm(R"(
.text
.p2align 4
emulation_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
)");
#else
#error "the switch between fibers is written for x86-64 and AArch64"
#endif
extern "C" void emulation_switch(void **save, void *load) asm("emulation_switch");

namespace {

// Returns the stack pointer of a fiber that starts with `start`; its stack ends at `top`, a multiple of 16.
void *fresh_stack(void *end, void (*start)()) {
    auto *top = static_cast<uint64_t *>(end);
#if defined(__x86_64__)
    // A return address comes first, so that the alignment is that after a call: 8 past a multiple of 16.
    *--top = 0;
    *--top = reinterpret_cast<uint64_t>(start);
    top -= SAVED;
    memset(top, 0, SAVED * 8);
#else
    top -= 20;
    memset(top, 0, 160);
    top[11] = reinterpret_cast<uint64_t>(start);
#endif
    return top;
}

// Sets whether fp32 subnormals are flushed to zero; returns the previous mode, to restore it.
uint64_t flush_subnormals(bool flush) {
#if defined(__x86_64__)
    unsigned saved = __builtin_ia32_stmxcsr();
    if (flush) __builtin_ia32_ldmxcsr(saved | 0x8040);
#else
    uint64_t saved;
    asm volatile("mrs %0, fpcr" : "=r"(saved));
    if (flush) asm volatile("msr fpcr, %0" ::"r"(saved | 1ull << 24));
#endif
    return saved;
}
void restore_subnormals(uint64_t saved) {
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr(static_cast<unsigned>(saved));
#else
    asm volatile("msr fpcr, %0" ::"r"(saved));
#endif
}

}  // namespace
