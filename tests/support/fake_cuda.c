/* A libcuda.so.1 without a GPU: what Triton calls of the driver, which succeeds and runs nothing.

   Built and loaded by fake_cuda.py. It answers as an H100's would, and refuses the launches that an H100 refuses. */
#include "cuda.h"

#define MAX_THREADS 1024
#define MAX_GRID_YZ 65535
#define MAX_SHARED_BYTES (227 * 1024)

/* Arguments are not read, and what would be written is never used. */
#define SUCCEEDS(NAME, ...) \
  CUresult NAME(__VA_ARGS__) { return CUDA_SUCCESS; }

SUCCEEDS(cuInit, unsigned int flags)
SUCCEEDS(cuCtxSetCurrent, CUcontext context)
SUCCEEDS(cuCtxSetLimit, CUlimit limit, size_t value)
SUCCEEDS(cuFuncSetAttribute, CUfunction function, CUfunction_attribute attribute, int value)
SUCCEEDS(cuFuncSetCacheConfig, CUfunction function, CUfunc_cache config)
SUCCEEDS(cuModuleUnload, CUmodule module)

/* Handles that are not null, and numbers. */
#define GIVES(NAME, TYPE, VALUE, ...) \
  CUresult NAME(TYPE *result, ##__VA_ARGS__) { *result = (TYPE)(VALUE); return CUDA_SUCCESS; }

GIVES(cuCtxGetCurrent, CUcontext, 1)
GIVES(cuCtxGetDevice, CUdevice, 0)
GIVES(cuCtxGetLimit, size_t, 0, CUlimit limit)
GIVES(cuDeviceGet, CUdevice, 0, int ordinal)
GIVES(cuDeviceGetCount, int, 1)
GIVES(cuDevicePrimaryCtxRetain, CUcontext, 1, CUdevice device)
GIVES(cuDriverGetVersion, int, 13000)
GIVES(cuModuleGetFunction, CUfunction, 1, CUmodule module, const char *name)
GIVES(cuModuleLoadData, CUmodule, 1, const void *image)

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_INVALID_VALUE ? "grid, block or shared memory is larger than the GPU's" : "unknown";
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = MAX_SHARED_BYTES; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = MAX_SHARED_BYTES + 1024; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
    default: *value = 1; /* clocks and the like, which no kernel of ours depends on */
  }
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? MAX_THREADS : 0;
  return CUDA_SUCCESS;
}

/* Every address is the device's own. */
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
  int has_blocks = config->gridDimX > 0 && config->gridDimY > 0 && config->gridDimZ > 0;
  int fits_grid = config->gridDimY <= MAX_GRID_YZ && config->gridDimZ <= MAX_GRID_YZ;
  int fits_block = config->blockDimX * config->blockDimY * config->blockDimZ <= MAX_THREADS;
  int fits_memory = config->sharedMemBytes <= MAX_SHARED_BYTES;
  return has_blocks && fits_grid && fits_block && fits_memory ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
