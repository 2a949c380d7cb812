// Vector flash attention on the device: a whole launch, and the two functions that read blocks.
// SIMT_CASES names what is compiled: X(head size, K type, V type) for each; SIMT_KEYS and SIMT_VALUES: Y(type) for each type.
#include "device.h"

#include "kvq.cu"
#include "convert.cu"
#include "fattn-vec.cuh"

// Of the sparse kernels, which are not compiled here.
void ggml_cuda_flash_attn_ext_compact_mask(const ggml_tensor *, int32_t *, int32_t *, int32_t, int32_t, int32_t, cudaStream_t) {
    simt::fail("the vector kernel asked for a sparse mask");
}

// The node is a FLASH_ATTN_EXT whose tensors lie in host memory; false if the case was not compiled.
extern "C" int simt_attend(ggml_tensor * node) {
    ggml_backend_cuda_context ctx(0);
    const ggml_tensor * k = node->src[1];
    const ggml_tensor * v = node->src[2];
#define X(head, type_k, type_v)                                                                        \
    if (k->ne[0] == head && k->type == GGML_TYPE_##type_k && v->type == GGML_TYPE_##type_v) {           \
        ggml_cuda_flash_attn_ext_vec_case<head, GGML_TYPE_##type_k, GGML_TYPE_##type_v>(ctx, node);     \
        return 1;                                                                                       \
    }
    SIMT_CASES
#undef X
    return 0;
}

// One warp: each key's product with each query, as the kernel forms it from the query's q8_1 blocks.
template <ggml_type type, int D>
static __global__ void products(const char * keys, size_t stride, int n_keys, const int * q8, const float2 * ds, float * out) {
    constexpr int threads = D/4 < WARP_SIZE ? D/4 : WARP_SIZE;
    int    q[D/4/threads];
    float2 d[D/4/threads];
    for (int i = 0; i < D/4; i += threads) {
        q[i/threads] = q8[i + threadIdx.x % threads];
        d[i/threads] = ds[(i + threadIdx.x % threads) / QI8_1];
    }
    constexpr vec_dot_KQ_t dot = kvq_get_vec_dot_KQ<type, D, threads>();
    for (int k = 0; k < n_keys; ++k) {
        const float sum = warp_reduce_sum<threads>(dot(keys + k*stride, nullptr, q, d));
        if (threadIdx.x == 0) {
            out[k] = sum;
        }
    }
}

extern "C" int simt_products(int type, int head, const char * keys, size_t stride, int n_keys, const int * q8, const float2 * ds, float * out) {
#define Y(name)                                                                                                                     \
    if (type == GGML_TYPE_##name) {                                                                                                 \
        const auto kernel = head == 64 ? products<GGML_TYPE_##name, 64> : head == 128 ? products<GGML_TYPE_##name, 128> : products<GGML_TYPE_##name, 256>; \
        simt::launch_config(dim3(1), dim3(WARP_SIZE)).run(kernel)(keys, stride, n_keys, q8, ds, out);                                \
        return 1;                                                                                                                   \
    }
    SIMT_KEYS
#undef Y
    return 0;
}

// Each thread four values, of n in all.
template <ggml_type type>
static __global__ void values(const void * blocks, int n, float * out) {
    constexpr dequantize_V_t read = kvq_get_dequantize_V<type, float, 4>();
    for (int i = 4*threadIdx.x; i < n; i += 4*blockDim.x) {
        read(blocks, out + i, i);
    }
}

extern "C" int simt_values(int type, const void * blocks, int n, float * out) {
#define Y(name)                                                                                             \
    if (type == GGML_TYPE_##name) {                                                                         \
        simt::launch_config(dim3(1), dim3(WARP_SIZE)).run(values<GGML_TYPE_##name>)(blocks, n, out);         \
        return 1;                                                                                           \
    }
    SIMT_VALUES
#undef Y
    return 0;
}
