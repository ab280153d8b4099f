/* A stand-in for libamdhip64 with the ABI of ROCm 7 (hip_runtime_api.h) that launches nothing and writes down what it
 * is asked to. With -DROCM_6 it lacks what ROCm 7 brought. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    uint32_t id;
    char pad[8 - sizeof(uint32_t)];
    union {
        char pad[64];
        int cooperative;
    } value;
} hipLaunchAttribute;

typedef struct {
    uint32_t gridDimX, gridDimY, gridDimZ;
    uint32_t blockDimX, blockDimY, blockDimZ;
    uint32_t sharedMemBytes;
    void *hStream;
    hipLaunchAttribute *attrs;
    uint32_t numAttrs;
} HIP_LAUNCH_CONFIG;

_Static_assert(sizeof(hipLaunchAttribute) == 72, "hipLaunchAttribute");
_Static_assert(sizeof(HIP_LAUNCH_CONFIG) == 56, "HIP_LAUNCH_CONFIG");

static char text[4096];
static size_t used;
static int status, capture;

const char *stub_log(void) { return text; }
void stub_set(int launch_status, int capture_status) {
    used = 0;
    text[0] = 0;
    status = launch_status;
    capture = capture_status;
}

#ifndef ROCM_6
/* The kernel's parameters are taken to be a pointer, an int32 and a float. */
int hipDrvLaunchKernelEx(const HIP_LAUNCH_CONFIG *c, void *kernel, void **parameters, void **extra) {
    used += (size_t)snprintf(text + used, sizeof text - used,
                             "kernel %p grid %u %u %u block %u %u %u shared %u stream %p parameters %p %d %g extra %p",
                             kernel, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
                             c->sharedMemBytes, c->hStream, *(void **)parameters[0], *(int32_t *)parameters[1],
                             (double)*(float *)parameters[2], (void *)extra);
    for (uint32_t i = 0; i < c->numAttrs; i++)
        used += (size_t)snprintf(text + used, sizeof text - used, " attribute %u %d", c->attrs[i].id,
                                 c->attrs[i].value.cooperative);
    used += (size_t)snprintf(text + used, sizeof text - used, "\n");
    return status;
}
#endif

/* 0 none, 1 active, 2 invalidated */
int hipStreamIsCapturing(void *stream, int *result) {
    used += (size_t)snprintf(text + used, sizeof text - used, "capturing %p\n", stream);
    *result = capture;
    return status;
}

const char *hipGetErrorName(int error) { return error == 98 ? "hipErrorInvalidDeviceFunction" : "hipErrorUnknown"; }
