// The runtime functions that ggml-cuda's headers name: device memory is host memory, everything is done at once.
#pragma once

#include "half.h"

typedef int cudaError_t;
enum { cudaSuccess = 0 };
typedef void * cudaStream_t;
typedef void * cudaEvent_t;
typedef void * cudaGraph_t;
typedef void * cudaGraphExec_t;
typedef void * cudaGraphNode_t;
enum cudaMemcpyKind { cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault };
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

static inline const char * cudaGetErrorString(cudaError_t) { return "simt"; }
static inline cudaError_t cudaGetLastError() { return cudaSuccess; }
static inline cudaError_t cudaMalloc(void * pointer, size_t bytes) { *(void **) pointer = malloc(bytes); return cudaSuccess; }
static inline cudaError_t cudaFree(void * p) { free(p); return cudaSuccess; }
static inline cudaError_t cudaMemcpyAsync(void * to, const void * from, size_t n, cudaMemcpyKind, cudaStream_t = nullptr) {
    memcpy(to, from, n);
    return cudaSuccess;
}
static inline cudaError_t cudaMemcpy2DAsync(void * to, size_t to_pitch, const void * from, size_t from_pitch, size_t width, size_t height,
                                            cudaMemcpyKind, cudaStream_t = nullptr) {
    for (size_t i = 0; i < height; ++i) {
        memcpy((char *) to + i * to_pitch, (const char *) from + i * from_pitch, width);
    }
    return cudaSuccess;
}
static inline cudaError_t cudaMemsetAsync(void * p, int value, size_t n, cudaStream_t = nullptr) { memset(p, value, n); return cudaSuccess; }
static inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
static inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t * s, unsigned) { *s = malloc(1); return cudaSuccess; }
static inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t * e, unsigned) { *e = nullptr; return cudaSuccess; }
static inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
static inline cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
static inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
template <typename F> static inline cudaError_t cudaFuncSetAttribute(F, int, int) { return cudaSuccess; }
template <typename F> static inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int * n, F, int, size_t) { *n = 2; return cudaSuccess; }
