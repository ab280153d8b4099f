/* A stand-in for libamdhip64 with the ABI of ROCm (hip_runtime_api.h) that launches nothing and writes down what it is
 * asked to. It keeps the rules that were read in the sources of HIP's runtime (ROCm/clr, ROCm/rocm-systems):
 *   - a call that fails leaves its error behind in the calling thread until hipGetLastError is asked;
 *   - while a stream is captured, a launch by an entry point that knows of captures is recorded, any other one runs at
 *     once and is missing in the graph: hipDrvLaunchKernelEx up to ROCm 7.13, hipModuleLaunchCooperativeKernel up to 6;
 *   - a grid has at most 2**32 - 1 threads along each axis;
 *   - while anyone captures, a thread whose capture mode is not "relaxed" may not query an event;
 *   - 1 is no stream, but in the newest releases.
 * With -DROCM_6 it lacks what ROCm 7 brought. */
#include <stdarg.h>
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

enum { INVALID_VALUE = 1, INVALID_HANDLE = 400, CAPTURE_UNSUPPORTED = 900, RELAXED = 2 };

static char text[1 << 16];
static size_t used;
static int status, capture, failing;
static _Thread_local int sticky, mode;

static void said(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    used += (size_t)vsnprintf(text + used, sizeof text - used, format, arguments);
    va_end(arguments);
}

/* What every entry point returns by. */
static int returned(int value) {
    if (value) sticky = value;
    return value;
}

const char *stub_log(void) { return text; }
void stub_set(int launch_status, int capture_status) {
    used = 0;
    text[0] = 0;
    status = launch_status;
    capture = capture_status;
    sticky = mode = failing = 0;
}
void stub_fail_to_instantiate(int value) { failing = value; }

/* The kernel's parameters are taken to be a pointer, an int32 and a float. */
static int launched(const char *name, void *kernel, const uint32_t *grid, const uint32_t *block, uint32_t shared,
                    void *stream, void **parameters, int records) {
    if (stream == (void *)1) return returned(INVALID_HANDLE);
    for (int i = 0; i < 3; i++)
        if ((uint64_t)grid[i] * block[i] > UINT32_MAX) return returned(INVALID_VALUE);
    if (status) return returned(status);
    said("%s: kernel %p grid %u %u %u block %u %u %u shared %u stream %p parameters %p %d %g%s\n", name, kernel, grid[0],
         grid[1], grid[2], block[0], block[1], block[2], shared, stream, *(void **)parameters[0],
         *(int32_t *)parameters[1], (double)*(float *)parameters[2],
         !capture ? "" : records ? " recorded" : " NOT IN THE GRAPH");
    return returned(0);
}

int hipModuleLaunchKernel(void *kernel, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by, uint32_t bz,
                          uint32_t shared, void *stream, void **parameters, void **extra) {
    const uint32_t grid[] = {gx, gy, gz}, block[] = {bx, by, bz};
    if (extra) return returned(INVALID_VALUE);
    return launched("plain", kernel, grid, block, shared, stream, parameters, 1);
}

int hipModuleLaunchCooperativeKernel(void *kernel, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by,
                                     uint32_t bz, uint32_t shared, void *stream, void **parameters) {
    const uint32_t grid[] = {gx, gy, gz}, block[] = {bx, by, bz};
    return launched("cooperative", kernel, grid, block, shared, stream, parameters, 0);
}

#ifndef ROCM_6
int hipDrvLaunchKernelEx(const HIP_LAUNCH_CONFIG *c, void *kernel, void **parameters, void **extra) {
    if (extra) return returned(INVALID_VALUE);
    return launched("by attributes", kernel, &c->gridDimX, &c->blockDimX, c->sharedMemBytes, c->hStream, parameters, 0);
}
#endif

/* 0 none, 1 active, 2 invalidated */
int hipStreamIsCapturing(void *stream, int *result) {
    said("capturing %p\n", stream);
    *result = capture;
    return returned(status);
}

int hipStreamBeginCapture(void *stream, int how) {
    if (stream <= (void *)2 || how < 0 || how > RELAXED) return returned(INVALID_VALUE);
    capture = 1;
    said("begin %p %d\n", stream, how);
    return returned(status);
}
int hipStreamEndCapture(void *stream, void **graph) {
    said("end %p\n", stream);
    capture = 0;
    *graph = status ? NULL : (void *)0xA000;
    return returned(status);
}
int hipGraphInstantiateWithFlags(void **made, void *graph, unsigned long long flags) {
    said("instantiate %p %llu\n", graph, flags);
    *made = (void *)0xB000;
    return returned(failing);
}
int hipGraphLaunch(void *made, void *stream) {
    said("launch %p %p\n", made, stream);
    return returned(status);
}
int hipGraphDestroy(void *graph) {
    said("destroy graph %p\n", graph);
    return returned(0);
}
int hipGraphExecDestroy(void *made) {
    said("destroy executable %p\n", made);
    return returned(0);
}

int hipThreadExchangeStreamCaptureMode(int *wanted) {
    const int before = mode;
    mode = *wanted;
    *wanted = before;
    return returned(0);
}

int hipEventQuery(void *event) {
    (void)event;
    return returned(capture && mode != RELAXED ? CAPTURE_UNSUPPORTED : 0);
}

int hipMemsetD32Async(void *where, int value, size_t count, void *stream) {
    if (stream == (void *)1) return returned(INVALID_HANDLE);
    said("memset %p %x %zu stream %p\n", where, (unsigned)value, count, stream);
    return returned(status);
}

int hipGetLastError(void) {
    const int found = sticky;
    sticky = 0;
    return found;
}
int hipPeekAtLastError(void) { return sticky; }

const char *hipGetErrorName(int error) {
    return error == 98    ? "hipErrorInvalidDeviceFunction"
           : error == 900 ? "hipErrorStreamCaptureUnsupported"
           : error == 1   ? "hipErrorInvalidValue"
                          : "hipErrorUnknown";
}
