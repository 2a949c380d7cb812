// Names only: nothing that runs here multiplies through cuBLAS.
#pragma once

typedef void * cublasHandle_t;
enum cublasStatus_t {
    CUBLAS_STATUS_SUCCESS, CUBLAS_STATUS_NOT_INITIALIZED, CUBLAS_STATUS_ALLOC_FAILED, CUBLAS_STATUS_INVALID_VALUE,
    CUBLAS_STATUS_ARCH_MISMATCH, CUBLAS_STATUS_MAPPING_ERROR, CUBLAS_STATUS_EXECUTION_FAILED, CUBLAS_STATUS_INTERNAL_ERROR,
    CUBLAS_STATUS_NOT_SUPPORTED,
};
enum { CUBLAS_TF32_TENSOR_OP_MATH };
static inline cublasStatus_t cublasCreate(cublasHandle_t *) { return CUBLAS_STATUS_NOT_SUPPORTED; }
static inline cublasStatus_t cublasSetMathMode(cublasHandle_t, int) { return CUBLAS_STATUS_NOT_SUPPORTED; }
static inline cublasStatus_t cublasSetStream(cublasHandle_t, void *) { return CUBLAS_STATUS_NOT_SUPPORTED; }
