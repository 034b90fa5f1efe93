/* A stand-in for libcuda.so.1 in tests without a GPU. It has the functions that kvikio and this project's probe call.
 *
 * There is one device. Memory from cuMemAlloc counts as device memory, all other memory as host memory, and copies use
 * memcpy. STAND_IN_CUDA=hang makes cuInit spin forever, as a broken driver may. With STAND_IN_CUDA=no-device, the driver
 * has no device. With STAND_IN_CUDA=wrong-bytes, copies from the device to the host return wrong bytes.
 */
#include <stdlib.h>
#include <string.h>

typedef unsigned long long pointer;

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, NUM_RANGES = 64 };
enum { CONTEXT = 1, MEMORY_TYPE = 2, DEVICE_ORDINAL = 9 };
enum { HOST = 1, DEVICE = 2, ALIGNMENT = 1 << 16, VERSION = 13000 };

static struct { pointer start; size_t nbytes; } ranges[NUM_RANGES];
static int the_context, the_stream, the_event;

static int is_mode(const char *name) {
    const char *mode = getenv("STAND_IN_CUDA");
    return mode != NULL && strcmp(mode, name) == 0;
}

static int range_of(pointer address) {
    for (int i = 0; i < NUM_RANGES; i++)
        if (ranges[i].nbytes && address >= ranges[i].start && address < ranges[i].start + ranges[i].nbytes) return i;
    return -1;
}

static int copy(pointer to, pointer from, size_t nbytes) { memcpy((void *)to, (void *)from, nbytes); return OK; }

int cuInit(unsigned flags) { while (is_mode("hang")) { } return is_mode("no-device") ? NO_DEVICE : OK; }
int cuDriverGetVersion(int *version) { *version = VERSION; return OK; }
int cuGetErrorName(int error, const char **text) { *text = "STAND_IN_ERROR"; return OK; }
int cuGetErrorString(int error, const char **text) { *text = "the stand-in refused"; return OK; }
int cuDeviceGet(int *device, int ordinal) { *device = 0; return ordinal == 0 ? OK : NO_DEVICE; }
int cuDeviceGetCount(int *count) { *count = 1; return OK; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 1; return OK; }

int cuCtxCreate_v4(void **context, void *options, unsigned flags, int device) { *context = &the_context; return OK; }
int cuCtxDestroy_v2(void *context) { return OK; }
int cuCtxPushCurrent_v2(void *context) { return OK; }
int cuCtxPopCurrent_v2(void **context) { if (context) *context = &the_context; return OK; }
int cuCtxGetCurrent(void **context) { *context = &the_context; return OK; }
int cuCtxGetDevice(int *device) { *device = 0; return OK; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &the_context; return OK; }
int cuDevicePrimaryCtxRelease_v2(int device) { return OK; }

int cuMemAlloc_v2(pointer *address, size_t nbytes) {
    void *memory;
    int i = 0;
    while (i < NUM_RANGES && ranges[i].nbytes) i++;
    if (i == NUM_RANGES || nbytes == 0 || posix_memalign(&memory, ALIGNMENT, nbytes)) return OUT_OF_MEMORY;
    *address = ranges[i].start = (pointer)memory;
    ranges[i].nbytes = nbytes;
    return OK;
}
int cuMemFree_v2(pointer address) {
    int i = range_of(address);
    if (i < 0) return INVALID_VALUE;
    ranges[i].nbytes = 0;
    free((void *)address);
    return OK;
}
int cuMemHostAlloc(void **memory, size_t nbytes, unsigned flags) {
    return posix_memalign(memory, ALIGNMENT, nbytes) ? OUT_OF_MEMORY : OK;
}
int cuMemFreeHost(void *memory) { free(memory); return OK; }
int cuMemHostRegister_v2(void *memory, size_t nbytes, unsigned flags) { return OK; }
int cuMemHostUnregister(void *memory) { return OK; }
int cuMemGetAddressRange_v2(pointer *start, size_t *nbytes, pointer address) {
    int i = range_of(address);
    if (i < 0) return INVALID_VALUE;
    if (start) *start = ranges[i].start;
    if (nbytes) *nbytes = ranges[i].nbytes;
    return OK;
}
int cuPointerGetAttribute(void *value, int attribute, pointer address) {
    int is_device = range_of(address) >= 0;
    if (attribute == MEMORY_TYPE) { *(int *)value = is_device ? DEVICE : HOST; return OK; }
    if (attribute == CONTEXT && is_device) { *(void **)value = &the_context; return OK; }
    if (attribute == DEVICE_ORDINAL && is_device) { *(int *)value = 0; return OK; }
    return INVALID_VALUE;
}
int cuPointerGetAttributes(unsigned count, int *attributes, void **values, pointer address) {
    for (unsigned i = 0; i < count; i++) {
        int error = cuPointerGetAttribute(values[i], attributes[i], address);
        if (error) return error;
    }
    return OK;
}

int cuMemcpyHtoD_v2(pointer to, const void *from, size_t nbytes) { return copy(to, (pointer)from, nbytes); }
int cuMemcpyDtoH_v2(void *to, pointer from, size_t nbytes) {
    copy((pointer)to, from, nbytes);
    if (is_mode("wrong-bytes")) *(char *)to ^= 1;
    return OK;
}
int cuMemcpyAsync(pointer to, pointer from, size_t nbytes, void *stream) { return copy(to, from, nbytes); }
int cuMemcpyHtoDAsync_v2(pointer to, const void *from, size_t nbytes, void *s) { return copy(to, (pointer)from, nbytes); }
int cuMemcpyDtoHAsync_v2(void *to, pointer from, size_t nbytes, void *s) { return copy((pointer)to, from, nbytes); }
int cuMemcpyBatchAsync_v2(pointer *to, pointer *from, size_t *nbytes, size_t count) {
    for (size_t i = 0; i < count; i++) copy(to[i], from[i], nbytes[i]);
    return OK;
}
int cuStreamCreate(void **stream, unsigned flags) { *stream = &the_stream; return OK; }
int cuStreamDestroy_v2(void *stream) { return OK; }
int cuStreamSynchronize(void *stream) { return OK; }
int cuEventCreate(void **event, unsigned flags) { *event = &the_event; return OK; }
int cuEventDestroy_v2(void *event) { return OK; }
int cuEventRecord(void *event, void *stream) { return OK; }
int cuEventQuery(void *event) { return OK; }
int cuEventSynchronize(void *event) { return OK; }
int cuLaunchHostFunc(void *stream, void (*function)(void *), void *argument) { function(argument); return OK; }
