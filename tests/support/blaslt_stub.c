/* A stand-in for libcublasLt (or, with -DHIP, libhipblaslt) with the real ABI, that computes nothing and writes
 * down every call: one line each, objects as a letter and a number, in the order of their making. It checks what the
 * real one checks (kinds of objects, widths of attributes) and answers INVALID_VALUE where that is wrong.
 * Numbers stand here as the vendors' headers have them, not as the package does.
 *
 * hipBLASLt's own rules, as its sources have them:
 *   - no algorithm is offered where C and D have different types;
 *   - launches of two streams by one handle share the flags that their blocks wait for (stub_idle: all of a stream is
 *     done): the second one fails here, where the real ones wait forever;
 *   - a handle allocates and clears memory, which a thread may not do while anyone captures, unless it is relaxed;
 *   - an algorithm's first launch loads its code, which a capture cannot record. */
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef HIP
#define NAME(x) hipblasLt##x
enum { INVALID_VALUE = 3, ALGORITHM = 24, RESULT = 56 };
/* TRANSA TRANSB EPILOGUE BIAS_POINTER BIAS_DATA_TYPE A B C D scale pointers POINTER_MODE AMAX_D A B modes */
static const int widths[][2] = {{0, 4}, {1, 4}, {2, 4}, {3, 8}, {4, 4}, {5, 8}, {6, 8}, {7, 8},
                                {8, 8}, {13, 4}, {14, 8}, {31, 4}, {32, 4}, {-1, 0}};
enum { BIAS = 3, SCALE_A = 5, SCALE_B = 6, SCALE_D = 8, AMAX_D = 14 };
static const int preference_widths[][2] = {{0, 4}, {1, 8}, {-1, 0}};
#else
#define NAME(x) cublasLt##x
enum { INVALID_VALUE = 7, ALGORITHM = 64, RESULT = 96 };
/* TRANSA TRANSB EPILOGUE BIAS_POINTER A B C D scale pointers AMAX_D FAST_ACCUM BIAS_DATA_TYPE A B C D modes */
static const int widths[][2] = {{3, 4}, {4, 4}, {7, 4}, {8, 8}, {17, 8}, {18, 8}, {19, 8}, {20, 8}, {21, 8},
                                {25, 1}, {26, 4}, {31, 4}, {32, 4}, {33, 4}, {34, 4}, {-1, 0}};
enum { BIAS = 8, SCALE_A = 17, SCALE_B = 18, SCALE_D = 20, AMAX_D = 21 };
static const int preference_widths[][2] = {{1, 8}, {5, 4}, {6, 4}, {7, 4}, {8, 4}, {-1, 0}};
#endif

typedef struct {
    char kind; /* h handle, d descriptor, l layout, p preference; upper case once destroyed */
    int number;
    volatile uint64_t values[64];
    void *stream; /* of a handle: whose launches it has flags for */
} Object;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char text[1 << 22];
static size_t used;
static int made[128];
static char failing[64];
static int failing_status, offers = 2;
static int tiles[256], clusters[256]; /* of algorithms, by their first byte */
static int vectors;    /* what stands before the first algorithm that is offered for vectors of scales */
static size_t version = 130100;
static int capturing, relaxed; /* whether anyone captures, and the mode of the thread that is asked about */
static int loaded[256];        /* algorithms that ran before */

const char *stub_log(void) { return text; }
void stub_reset(void) {
    used = 0;
    text[0] = 0;
    memset(made, 0, sizeof made);
    failing[0] = 0;
    offers = 2;
    memset(tiles, 0, sizeof tiles);
    memset(clusters, 0, sizeof clusters);
    vectors = 0;
    version = 130100;
    capturing = relaxed = 0;
    memset(loaded, 0, sizeof loaded);
}
void stub_capturing(int value) { capturing = value; }
void stub_relaxed(int value) { relaxed = value; }
void stub_fail(const char *function, int status) {
    snprintf(failing, sizeof failing, "%s", function);
    failing_status = status;
}
void stub_offers(int count) { offers = count; }
void stub_tile(int algorithm, int tile, int cluster) {
    tiles[algorithm] = tile;
    clusters[algorithm] = cluster;
}
void stub_vectors(int before) { vectors = before; }
void stub_version(size_t number) { version = number; }

static int said(const char *function, const char *format, ...) {
    va_list arguments;
    pthread_mutex_lock(&lock);
    if (used > sizeof text - 4096) abort(); /* a test that says so much has to forget more often */
    used += snprintf(text + used, sizeof text - used, "%s ", function);
    va_start(arguments, format);
    used += vsnprintf(text + used, sizeof text - used, format, arguments);
    va_end(arguments);
    used += snprintf(text + used, sizeof text - used, "\n");
    int status = strcmp(failing, function) == 0 ? failing_status : 0;
    pthread_mutex_unlock(&lock);
    return status;
}

static Object *make(char kind) {
    Object *object = calloc(1, sizeof *object);
    pthread_mutex_lock(&lock);
    object->kind = kind;
    object->number = ++made[(int)kind];
    pthread_mutex_unlock(&lock);
    return object;
}

static int is(const Object *object, char kind) { return object && object->kind == kind; }

static uint64_t number_at(const void *buffer, size_t size) {
    uint64_t value = 0;
    memcpy(&value, buffer, size);
    return value;
}

static int set(const char *function, Object *object, char kind, const int (*table)[2], int attribute, const void *buffer,
               size_t size) {
    int status = is(object, kind) ? said(function, "%c%d %d %zu %lld", kind, object->number, attribute, size,
                                         (long long)number_at(buffer, size > 8 ? 8 : size))
                                  : INVALID_VALUE;
    if (status) return status;
    for (; (*table)[0] >= 0; ++table)
        if ((*table)[0] == attribute && (*table)[1] == (int)size) {
            object->values[attribute] = number_at(buffer, size);
            return 0;
        }
    return INVALID_VALUE;
}

static int destroy(const char *function, Object *object, char kind) {
    if (!is(object, kind)) return INVALID_VALUE;
    object->kind = (char)(kind - 32); /* the memory stays, so that a use after this is seen and not a crash */
    return said(function, "%c%d", kind, object->number);
}

#ifndef HIP
size_t NAME(GetVersion)(void) { return version; }
#endif

static Object *handles[256];

int NAME(Create)(Object **out) {
    int status = said("Create", "h%d", made['h'] + 1);
#ifdef HIP
    if (capturing && !relaxed) return 6; /* INTERNAL_ERROR */
#endif
    if (!status) *out = handles[(made['h'] + 1) % 256] = make('h');
    return status;
}
/* All that was launched on a stream is done. */
void stub_idle(void *stream) {
    for (int i = 0; i < 256; i++)
        if (handles[i] && handles[i]->stream == stream) handles[i]->stream = NULL;
}

int NAME(MatmulDescCreate)(Object **out, int compute, int scale) {
    Object *object = make('d');
    *out = object;
    return said("MatmulDescCreate", "d%d %d %d", object->number, compute, scale);
}
int NAME(MatmulDescDestroy)(Object *object) { return destroy("MatmulDescDestroy", object, 'd'); }
int NAME(MatmulDescSetAttribute)(Object *object, int attribute, const void *buffer, size_t size) {
    return set("MatmulDescSetAttribute", object, 'd', widths, attribute, buffer, size);
}

int NAME(MatrixLayoutCreate)(Object **out, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    Object *object = make('l');
    *out = object;
    object->values[0] = (uint64_t)type;
    return said("MatrixLayoutCreate", "l%d %d %llu %llu %lld", object->number, type, (unsigned long long)rows,
                (unsigned long long)columns, (long long)leading);
}
int NAME(MatrixLayoutDestroy)(Object *object) { return destroy("MatrixLayoutDestroy", object, 'l'); }

int NAME(MatmulPreferenceCreate)(Object **out) {
    Object *object = make('p');
    *out = object;
    return said("MatmulPreferenceCreate", "p%d", object->number);
}
int NAME(MatmulPreferenceDestroy)(Object *object) { return destroy("MatmulPreferenceDestroy", object, 'p'); }
int NAME(MatmulPreferenceSetAttribute)(Object *object, int attribute, const void *buffer, size_t size) {
    return set("MatmulPreferenceSetAttribute", object, 'p', preference_widths, attribute, buffer, size);
}

int NAME(MatmulAlgoGetHeuristic)(Object *handle, Object *operation, Object *a, Object *b, Object *c, Object *d,
                                 Object *preference, int asked, unsigned char *results, int *count) {
    if (!is(handle, 'h') || !is(operation, 'd') || !is(a, 'l') || !is(b, 'l') || !is(c, 'l') || !is(d, 'l') ||
        !is(preference, 'p'))
        return INVALID_VALUE;
    int status = said("MatmulAlgoGetHeuristic", "h%d d%d l%d l%d l%d l%d p%d %d", handle->number, operation->number,
                      a->number, b->number, c->number, d->number, preference->number, asked);
    *count = offers < asked ? offers : asked;
#ifdef HIP
    if (c->values[0] != d->values[0]) *count = 0; /* Tensile: TypesEqual(a, b, c, d, compute input) */
#endif
    for (int i = 0; i < *count; ++i) {
        unsigned char *result = results + i * RESULT;
        memset(result, 0xee, RESULT);
        memset(result, i + 1 + (operation->values[31] == 3 ? vectors : 0), ALGORITHM);
        *(size_t *)(result + ALGORITHM) = (size_t)(i + 1) * 1000;
        *(int *)(result + ALGORITHM + 8) = 0;
        *(float *)(result + ALGORITHM + 12) = 0.5f * (float)(i + 1);
    }
    return status;
}

#ifndef HIP
int NAME(MatmulAlgoCheck)(Object *handle, Object *operation, Object *a, Object *b, Object *c, Object *d,
                          const unsigned char *algorithm, unsigned char *result) {
    if (!is(handle, 'h') || !is(operation, 'd') || !is(a, 'l') || !is(b, 'l') || !is(c, 'l') || !is(d, 'l'))
        return INVALID_VALUE;
    memset(result, 0, RESULT);
    memcpy(result, algorithm, ALGORITHM);
    return said("MatmulAlgoCheck", "d%d algorithm=%d", operation->number, algorithm[0]);
}

int NAME(MatmulAlgoConfigGetAttribute)(const unsigned char *algorithm, int attribute, uint32_t *value, size_t size,
                                       size_t *written) {
    if (size != (attribute > 6 ? 2 : 4)) return INVALID_VALUE;
    int number = attribute == 1 ? tiles[algorithm[0]] : attribute == 8 ? clusters[algorithm[0]] : 1; /* SPLITK_NUM */
    memcpy(value, &number, size);
    *written = size;
    return 0;
}
#endif

int NAME(Matmul)(Object *handle, Object *operation, const float *alpha, void *pa, Object *a, void *pb, Object *b,
                 const float *beta, void *pc, Object *c, void *pd, Object *d, const unsigned char *algorithm,
                 void *workspace, size_t workspace_bytes, void *stream) {
    if (!is(handle, 'h') || !is(operation, 'd') || !is(a, 'l') || !is(b, 'l') || !is(c, 'l') || !is(d, 'l'))
        return INVALID_VALUE;
    int whole = 1;
    for (int i = 1; i < ALGORITHM; ++i) whole &= algorithm[i] == algorithm[0];
#ifdef HIP
    if (handle->stream && handle->stream != stream) return said("Matmul", "SHARED h%d", handle->number) | 5;
    if (capturing && !loaded[algorithm[0]]) return said("Matmul", "LOADED WHILE CAPTURED %d", algorithm[0]) | 5;
    handle->stream = stream;
    loaded[algorithm[0]] = 1;
#endif
    uint64_t scale_b = operation->values[SCALE_B];
    usleep(200); /* time for another thread to change a descriptor that it should not have */
    return said("Matmul",
                "h%d d%d alpha=%g A=%llu l%d B=%llu l%d beta=%g C=%llu l%d D=%llu l%d algorithm=%d%s workspace=%llu+%zu "
                "stream=%llu scale_A=%llu scale_B=%llu bias=%llu scale_D=%llu amax=%llu%s",
                handle->number, operation->number, *alpha, (unsigned long long)(uintptr_t)pa, a->number,
                (unsigned long long)(uintptr_t)pb, b->number, *beta, (unsigned long long)(uintptr_t)pc, c->number,
                (unsigned long long)(uintptr_t)pd, d->number, algorithm[0], whole ? "" : " cut",
                (unsigned long long)(uintptr_t)workspace, workspace_bytes, (unsigned long long)(uintptr_t)stream,
                (unsigned long long)operation->values[SCALE_A], (unsigned long long)scale_b,
                (unsigned long long)operation->values[BIAS], (unsigned long long)operation->values[SCALE_D],
                (unsigned long long)operation->values[AMAX_D],
                scale_b == operation->values[SCALE_B] ? "" : " RACE");
}
