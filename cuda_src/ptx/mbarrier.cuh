// mbarriers: barriers in shared memory that count arrivals and bytes, on sm_90 and later. The instructions take
// addresses in shared memory as 32-bit numbers.
#pragma once

#if FP8CORE_PTX >= 900
DEVICE unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }
// The address in block `rank` of the cluster that corresponds to this block's `address`.
DEVICE unsigned cluster_address(unsigned address, unsigned rank) {
    unsigned remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}
// Phase p completes when all its arrivals and its expected bytes are in; waits take the parity of p.
DEVICE void barrier_init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(unsigned barrier, unsigned parity) {
    asm volatile("{\n\t.reg .pred done;\n"
                 "again:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "\t@!done bra again;\n\t}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}
DEVICE void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Whether phase p is complete.
DEVICE bool barrier_passed(unsigned barrier, unsigned parity) {
    unsigned passed;
    asm volatile("{\n\t.reg .pred done;\n\t"
                 "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, done;\n\t}"
                 : "=r"(passed)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return passed;
}
#endif
