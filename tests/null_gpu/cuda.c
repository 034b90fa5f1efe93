// Stub of libcuda: the functions that torch, its allocator and Triton call. Its state is in the stub of libcudart.
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "null.h"

int cudaGetDevice(int *device);

#define OK return CUDA_SUCCESS
#define ROUNDED(nbytes) (((nbytes) + PAGE - 1) & ~(size_t)(PAGE - 1))

static void *context = (void *)0x10, *module = (void *)0x20, *function = (void *)0x30;

CUresult cuInit(unsigned flags) { return null_num_devices() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; OK; }
CUresult cuDeviceGet(CUdevice *device, int number) { *device = number; OK; }
CUresult cuDeviceGetCount(int *count) { *count = null_num_devices(); OK; }
CUresult cuDeviceGetName(char *text, int size, CUdevice device) { snprintf(text, size, "NULL H200"); OK; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) { *value = null_attribute(attribute); OK; }
CUresult cuCtxGetCurrent(CUcontext *found) { *found = context; OK; }
CUresult cuCtxSetCurrent(CUcontext given) { OK; }
CUresult cuCtxGetDevice(CUdevice *device) { return cudaGetDevice(device); }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { OK; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 1 << 20; OK; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *found, CUdevice device) { *found = context; OK; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    if (flags) *flags = 0;
    *active = 1;
    OK;
}

CUresult cuModuleLoad(CUmodule *found, const char *path) { *found = module; OK; }
CUresult cuModuleLoadData(CUmodule *found, const void *image) { *found = module; OK; }
CUresult cuModuleUnload(CUmodule given) { OK; }
CUresult cuModuleGetFunction(CUfunction *found, CUmodule given, const char *name) { *found = function; OK; }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction given) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    OK;
}
CUresult cuFuncSetAttribute(CUfunction given, CUfunction_attribute attribute, int value) { OK; }
CUresult cuFuncSetCacheConfig(CUfunction given, CUfunc_cache config) { OK; }
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction given, const CUlaunchConfig *config) { *count = 1; OK; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction given, int threads, size_t shared) { *count = 2; OK; }

static CUresult launched(void) {
    __sync_add_and_fetch(&null_state()->counts[DRIVER_LAUNCHES], 1);
    OK;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **arguments, void **more) { return launched(); }
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                        CUstream stream, void **arguments, void **more) { return launched(); }
CUresult cuStreamSynchronize(CUstream stream) {
    null_state()->counts[SYNCS]++;
    OK;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr at) {
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr *)value = at;
    else if (attribute == CU_POINTER_ATTRIBUTE_BUFFER_ID) *(unsigned long long *)value = 1;
    else *(int *)value = 1;
    OK;
}
CUresult cuGetErrorString(CUresult error, const char **text) { *text = "null gpu error"; OK; }
CUresult cuGetErrorName(CUresult error, const char **text) { *text = "CUDA_ERROR_NULL"; OK; }

// -- mappings: the expandable segments of torch's allocator -------------------------------------------------------------

static struct { size_t nbytes; int device; } made[1 << 16];
static unsigned num_made;

CUresult cuMemGetAllocationGranularity(size_t *nbytes, const CUmemAllocationProp *wanted, CUmemAllocationGranularity_flags option) { *nbytes = PAGE; OK; }

CUresult cuMemAddressReserve(CUdeviceptr *at, size_t nbytes, size_t alignment, CUdeviceptr wish, unsigned long long flags) {
    void *room = mmap(0, nbytes + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    int device;
    if (room == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    cudaGetDevice(&device);
    *at = ROUNDED((uintptr_t)room);
    null_add((void *)*at, nbytes, DEVICE, device);
    OK;
}

CUresult cuMemAddressFree(CUdeviceptr at, size_t nbytes) {
    null_forget((void *)at, DEVICE);
    munmap((void *)at, nbytes);
    OK;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t nbytes, const CUmemAllocationProp *wanted, unsigned long long flags) {
    int device = wanted->location.id;
    if (!null_take(device, nbytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = __sync_add_and_fetch(&num_made, 1) & 0xffff;
    made[*handle].nbytes = nbytes, made[*handle].device = device;
    OK;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    null_give_back(made[handle & 0xffff].device, made[handle & 0xffff].nbytes);
    made[handle & 0xffff].nbytes = 0;
    OK;
}

CUresult cuMemMap(CUdeviceptr at, size_t nbytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) { OK; }
CUresult cuMemSetAccess(CUdeviceptr at, size_t nbytes, const CUmemAccessDesc *who, size_t count) {
    return mprotect((void *)at, nbytes, PROT_READ | PROT_WRITE) ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

// Makes the memory inaccessible, so that a later access crashes the process.
CUresult cuMemUnmap(CUdeviceptr at, size_t nbytes) {
    madvise((void *)at, nbytes, MADV_DONTNEED);
    mprotect((void *)at, nbytes, PROT_NONE);
    OK;
}
