// The part of cuBLAS that ggml-cuda names, declared only: so that its sources compile where the library, which is large, is
// not installed. Never linked.
#pragma once

#include <cuda_runtime.h>
#include <library_types.h>

typedef struct cublasContext * cublasHandle_t;

enum cublasStatus_t { CUBLAS_STATUS_SUCCESS = 0 };
enum cublasOperation_t { CUBLAS_OP_N, CUBLAS_OP_T };
enum cublasMath_t { CUBLAS_TF32_TENSOR_OP_MATH };
enum cublasFillMode_t { CUBLAS_FILL_MODE_LOWER, CUBLAS_FILL_MODE_UPPER };
enum cublasDiagType_t { CUBLAS_DIAG_NON_UNIT };
enum cublasSideMode_t { CUBLAS_SIDE_LEFT, CUBLAS_SIDE_RIGHT };
enum cublasComputeType_t { CUBLAS_COMPUTE_16F, CUBLAS_COMPUTE_32F };
enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT_TENSOR_OP };

const char *   cublasGetStatusString(cublasStatus_t status);
cublasStatus_t cublasCreate(cublasHandle_t * handle);
cublasStatus_t cublasDestroy(cublasHandle_t handle);
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode);
cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream);
cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void * workspace, size_t bytes);
cublasStatus_t cublasSgemm(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n, int k,
                           const float * alpha, const float * a, int lda, const float * b, int ldb, const float * beta, float * c, int ldc);
cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n, int k,
                            const void * alpha, const void * a, cudaDataType a_type, int lda, const void * b, cudaDataType b_type, int ldb,
                            const void * beta, void * c, cudaDataType c_type, int ldc, cublasComputeType_t compute, cublasGemmAlgo_t algo);
cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n, int k,
                                          const void * alpha, const void * a, cudaDataType a_type, int lda, long long stride_a,
                                          const void * b, cudaDataType b_type, int ldb, long long stride_b, const void * beta, void * c,
                                          cudaDataType c_type, int ldc, long long stride_c, int count, cublasComputeType_t compute,
                                          cublasGemmAlgo_t algo);
cublasStatus_t cublasGemmBatchedEx(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n, int k,
                                   const void * alpha, const void * const a[], cudaDataType a_type, int lda, const void * const b[],
                                   cudaDataType b_type, int ldb, const void * beta, void * const c[], cudaDataType c_type, int ldc, int count,
                                   cublasComputeType_t compute, cublasGemmAlgo_t algo);
