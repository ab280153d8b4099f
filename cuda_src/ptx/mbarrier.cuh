// Words for barriers in shared memory and for the shared memory of other blocks of a cluster: sm_90 and later, whose
// instructions take addresses in shared memory as numbers of 32 bits.
#pragma once

#if FP8CORE_PTX >= 900
DEVICE unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }
// Where block `rank` of the cluster has what this block has at an address.
DEVICE unsigned cluster_address(unsigned address, unsigned rank) {
    unsigned remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}
// Phase p is complete when its arrivals and its announced bytes are in; waits take p's parity.
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
                 "\t@!done bra again;\n\t}" ::"r"(barrier), "r"(parity) : "memory");
}
#endif
