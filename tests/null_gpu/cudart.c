// Stub of libcudart: device memory is host memory that only copies and fills touch, and kernels do nothing.
//
// Environment: NULL_GPU_COUNT: number of devices (default: 1). NULL_GPU_BYTES: memory of each (default: of an H200).
// NULL_COPY_BYTES: size above which copies and fills are skipped (default: 64 MiB). NULL_REUSE: cudaFree fills smaller
// memory with NaNs, and cudaMalloc of the same size reuses it. NULL_VERBOSE: print counts at the end of the process.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#define CUDARTAPI
#include <cuda_runtime_api.h>
#undef cudaGetDeviceProperties
#include "null.h"

#define OK return cudaSuccess
#define MAP (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)

static size_t number_of(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, 0, 10) : otherwise;
}

// -- devices ----------------------------------------------------------------------------------------------------------

struct null_state null_counts; // `counts` must be the first member, because `steps.py` reads it
#define state null_counts
static int buses[MOST_DEVICES], num_devices = -1;
static __thread int current;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

struct null_state *null_state(void) { return &state; }

// Like the real driver, this reads CUDA_VISIBLE_DEVICES at the first call of any kind, and never again.
int null_num_devices(void) {
    pthread_mutex_lock(&lock);
    if (num_devices < 0) {
        int there = number_of("NULL_GPU_COUNT", 1);
        const char *visible = getenv("CUDA_VISIBLE_DEVICES");
        num_devices = 0;
        if (!visible)
            for (int each = 0; each < there && each < MOST_DEVICES; each++) buses[num_devices++] = each;
        else
            for (char *rest = strdup(visible), *word; (word = strsep(&rest, ",")) && *word;) {
                int each = atoi(word);
                if (each < 0 || each >= there || num_devices == MOST_DEVICES) break;
                buses[num_devices++] = each;
            }
    }
    pthread_mutex_unlock(&lock);
    return num_devices;
}

int null_bus(int device) { return null_num_devices() > device ? buses[device] + 1 : 0; }
size_t null_total(void) { return number_of("NULL_GPU_BYTES", 150754820096ull); }

int null_take(int device, size_t nbytes) {
    if (__sync_add_and_fetch(&state.used[device], nbytes) <= null_total()) return 1;
    __sync_sub_and_fetch(&state.used[device], nbytes);
    return 0;
}

void null_give_back(int device, size_t nbytes) { __sync_sub_and_fetch(&state.used[device], nbytes); }

cudaError_t cudaGetDeviceCount(int *count) { return (*count = null_num_devices()) ? cudaSuccess : cudaErrorNoDevice; }
cudaError_t cudaGetDevice(int *device) { *device = current; OK; }
cudaError_t cudaSetDevice(int device) {
    if (device >= null_num_devices()) return cudaErrorInvalidDevice;
    current = device;
    OK;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    if (device >= null_num_devices()) return cudaErrorInvalidDevice;
    memset(p, 0, sizeof *p);
    strcpy(p->name, "NULL H200");
    p->totalGlobalMem = null_total();
    p->pciBusID = null_bus(device);
    p->major = 9;
    p->multiProcessorCount = 132, p->warpSize = 32, p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048;
    p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448, p->sharedMemPerMultiprocessor = 233472;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->l2CacheSize = 62914560, p->maxBlocksPerMultiProcessor = 32, p->memoryBusWidth = 6144, p->asyncEngineCount = 3;
    p->concurrentKernels = p->unifiedAddressing = p->managedMemory = p->streamPrioritiesSupported = 1;
    p->cooperativeLaunch = p->hostRegisterSupported = 1, p->textureAlignment = 512;
    OK;
}

int null_attribute(int attribute) {
    switch (attribute) {
        case 1: return 1024;             // threads per block
        case 5: return 2147483647;       // grid size, x
        case 6: case 7: return 65535;    // y, z
        case 8: return 49152;            // shared memory per block
        case 10: return 32;              // threads per warp
        case 12: case 82: return 65536;  // registers
        case 16: return 132;             // multiprocessors
        case 38: return 62914560;        // L2
        case 39: return 2048;            // threads per multiprocessor
        case 75: return 9;               // compute capability
        case 76: case 100: return 0;     // 100: uses the host's page tables
        case 81: return 233472;          // shared memory per multiprocessor
        case 97: return 232448;          // per block that opts in
        case 106: return 32;             // blocks per multiprocessor
        case 128: return 0;              // multicast
        default: return 1;
    }
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    *value = null_attribute(attribute);
    OK;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    snprintf(text, size, "0000:%02x:00.0", null_bus(device));
    OK;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 0; OK; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0, *greatest = -5; OK; }
cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; OK; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = 13000; OK; }
const char *cudaGetErrorString(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "out of memory" : "null gpu error"; }
const char *cudaGetErrorName(cudaError_t error) { return "cudaErrorNull"; }

__attribute__((destructor)) static void tell(void) {
    if (getenv("NULL_VERBOSE") && state.counts[LAUNCHES])
        fprintf(stderr, "[null gpu] launches %ld + %ld by the driver, copied %ld MB, set %ld MB, registered %ld, events %ld, waits %ld\n",
                state.counts[LAUNCHES], state.counts[DRIVER_LAUNCHES], state.counts[COPIED] >> 20, state.counts[SET] >> 20,
                state.counts[REGISTERED], state.counts[EVENTS], state.counts[SYNCS]);
}

// -- memory -----------------------------------------------------------------------------------------------------------

static struct range { uintptr_t at; size_t nbytes; enum kind kind; int device; struct range *next; } *ranges, *freed;

static void put(struct range **list, void *at, size_t nbytes, enum kind kind, int device) {
    struct range *range = malloc(sizeof *range);
    *range = (struct range){(uintptr_t)at, nbytes, kind, device, *list};
    *list = range;
}

void null_add(void *at, size_t nbytes, enum kind kind, int device) {
    pthread_mutex_lock(&lock);
    put(&ranges, at, nbytes, kind, device);
    pthread_mutex_unlock(&lock);
}

static struct range taken_out(void *at, enum kind kind) {
    struct range found = {0};
    pthread_mutex_lock(&lock);
    for (struct range **each = &ranges; *each; each = &(*each)->next)
        if ((*each)->at == (uintptr_t)at && (*each)->kind == kind) {
            struct range *range = *each;
            found = *range;
            *each = range->next;
            free(range);
            break;
        }
    pthread_mutex_unlock(&lock);
    return found;
}

size_t null_forget(void *at, enum kind kind) { return taken_out(at, kind).nbytes; }

static struct range holding(const void *at) {
    struct range found = {0};
    pthread_mutex_lock(&lock);
    for (struct range *each = ranges; each; each = each->next)
        if ((uintptr_t)at >= each->at && (uintptr_t)at < each->at + each->nbytes) { found = *each; break; }
    pthread_mutex_unlock(&lock);
    return found;
}

static void *freed_that_fits(size_t nbytes, int device) {
    void *at = 0;
    pthread_mutex_lock(&lock);
    for (struct range **each = &freed; *each; each = &(*each)->next)
        if ((*each)->device == device && (*each)->nbytes == nbytes) {
            struct range *range = *each;
            at = (void *)range->at;
            *each = range->next;
            free(range);
            break;
        }
    pthread_mutex_unlock(&lock);
    return at;
}

cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
    size_t taken = state.used[current] + 700000000ull;  // includes the context, kernels and library workspaces
    *total = null_total();
    if (*total < 4000000000ull) taken = state.used[current];
    *unused = taken < *total ? *total - taken : 0;
    OK;
}

cudaError_t cudaMalloc(void **at, size_t nbytes) {
    *at = 0;
    if (!null_take(current, nbytes)) return cudaErrorMemoryAllocation;
    if (!(*at = freed_that_fits(nbytes, current))) *at = mmap(0, nbytes + 4096, PROT_READ | PROT_WRITE, MAP, -1, 0);
    null_add(*at, nbytes, DEVICE, current);
    OK;
}

cudaError_t cudaFree(void *at) {
    struct range range = at ? taken_out(at, DEVICE) : (struct range){0};
    if (!range.nbytes) OK;
    null_give_back(range.device, range.nbytes);
    if (getenv("NULL_REUSE") && range.nbytes <= number_of("NULL_COPY_BYTES", 1u << 26)) {
        memset(at, 0xff, range.nbytes);
        pthread_mutex_lock(&lock);
        put(&freed, at, range.nbytes, DEVICE, range.device);
        pthread_mutex_unlock(&lock);
    } else {
        munmap(at, range.nbytes + 4096);
    }
    OK;
}

cudaError_t cudaHostAlloc(void **at, size_t nbytes, unsigned flags) {
    *at = mmap(0, nbytes, PROT_READ | PROT_WRITE, MAP, -1, 0);
    null_add(*at, nbytes, HOST, 0);
    OK;
}

cudaError_t cudaFreeHost(void *at) {
    size_t nbytes = null_forget(at, HOST);
    if (nbytes) munmap(at, nbytes);
    OK;
}

cudaError_t cudaHostRegister(void *at, size_t nbytes, unsigned flags) {
    state.counts[REGISTERED]++;
    if (holding(at).kind == HOST || holding((char *)at + nbytes - 1).kind == HOST) return cudaErrorHostMemoryAlreadyRegistered;
    null_add(at, nbytes, HOST, 0);
    OK;
}

cudaError_t cudaHostUnregister(void *at) { return null_forget(at, HOST) ? cudaSuccess : cudaErrorHostMemoryNotRegistered; }

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *at) {
    struct range range = holding(at);
    memset(found, 0, sizeof *found);
    found->type = range.kind, found->device = range.device;
    if (range.kind) found->devicePointer = (void *)at;
    if (range.kind == HOST) found->hostPointer = (void *)at;
    OK;
}

static cudaError_t copy(void *to, const void *from, size_t nbytes) {
    state.counts[COPIED] += nbytes;
    if (nbytes <= number_of("NULL_COPY_BYTES", 1u << 26)) memmove(to, from, nbytes);
    OK;
}

cudaError_t cudaMemset(void *at, int value, size_t nbytes) {
    state.counts[SET] += nbytes;
    if (nbytes <= number_of("NULL_COPY_BYTES", 1u << 26)) memset(at, value, nbytes);
    OK;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind kind) { return copy(to, from, n); }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind kind, cudaStream_t on) { return copy(to, from, n); }
cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t n, cudaStream_t on) { return copy(to, from, n); }
cudaError_t cudaMemsetAsync(void *at, int value, size_t n, cudaStream_t on) { return cudaMemset(at, value, n); }
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *at) { return cudaErrorNotSupported; }

// -- streams, events, kernels ------------------------------------------------------------------------------------------

static void *next(void) {
    static uintptr_t handle = 0x1000;
    return (void *)__sync_add_and_fetch(&handle, 16);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) { *stream = next(); OK; }
cudaError_t cudaStreamCreate(cudaStream_t *stream) { *stream = next(); OK; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = 0; OK; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { state.counts[SYNCS]++; OK; }
cudaError_t cudaDeviceSynchronize(void) { state.counts[SYNCS]++; OK; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { state.counts[SYNCS]++; OK; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { state.counts[EVENTS]++; *event = next(); OK; }
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) { *ms = 1.0f; OK; }
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t work, void *data) { work(data); OK; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) { *status = cudaStreamCaptureStatusNone; OK; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    OK;
}

cudaError_t cudaLaunchKernel(const void *f, struct dim3 g, struct dim3 b, void **a, size_t s, cudaStream_t on) { state.counts[LAUNCHES]++; OK; }
cudaError_t __cudaLaunchKernel(cudaKernel_t f, struct dim3 g, struct dim3 b, void **a, size_t s, cudaStream_t on) { state.counts[LAUNCHES]++; OK; }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *f, void **a) { state.counts[LAUNCHES]++; OK; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *f, int threads, size_t shared) { *blocks = 2; OK; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *f, int threads, size_t shared, unsigned flags) { *blocks = 2; OK; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *f) {
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024, found->numRegs = 64, found->maxDynamicSharedSizeBytes = 49152;
    found->ptxVersion = found->binaryVersion = 90;
    OK;
}

void **__cudaRegisterFatBinary(void *code) { static void *handle[4]; return handle; }
cudaError_t cudaGetSymbolAddress(void **at, const void *symbol) { static char room[1 << 20]; *at = room; OK; }

static int nothing(void) { return 0; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    static void *library;
    if (!library) library = dlopen("libcuda.so.1", RTLD_NOW);
    *function = library ? dlsym(library, name) : 0;
    if (!*function) *function = (void *)nothing;
    if (result) *result = cudaDriverEntryPointSuccess;
    OK;
}
