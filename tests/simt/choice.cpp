// Which attention kernel ggml-cuda chooses: fattn.cu as it is, with every kernel replaced by one that says its name.
// The test empties the headers of the kernels; what they declare for fattn.cu stands here.
#include "device.h"
#include "fattn-common.cuh"

static const char * simt_chosen;

template <int D, ggml_type type_K, ggml_type type_V>
void ggml_cuda_flash_attn_ext_vec_case(ggml_backend_cuda_context &, ggml_tensor * dst) {
    const bool stored = dst->src[1]->type == type_K && dst->src[2]->type == type_V;
    simt_chosen = stored ? "vec" : "vec of f16";
}
#define DECL_FATTN_VEC_CASE(D, type_K, type_V) int simt_no_instance

template <int DKQ, int DV, int ncols1, int ncols2>
void ggml_cuda_flash_attn_ext_mma_f16_case(ggml_backend_cuda_context &, ggml_tensor *) {
    simt_chosen = "mma";
}
static constexpr bool ggml_cuda_flash_attn_ext_mma_f16_may_use_sparse(int, int, int, int) {
    return false;
}
bool ggml_cuda_flash_attn_ext_mma_f16_shall_use_sparse(const int cc, const ggml_tensor * dst, const int ncols1, const int ncols2);

static void ggml_cuda_flash_attn_ext_tile(ggml_backend_cuda_context &, ggml_tensor *) {
    simt_chosen = "tile";
}

to_fp16_cuda_t    ggml_get_to_fp16_cuda(ggml_type)    { return nullptr; }
to_fp16_nc_cuda_t ggml_get_to_fp16_nc_cuda(ggml_type) { return nullptr; }

#include "fattn.cu"

// The GPU's compute capability, as ggml counts it: 890 for 8.9.
extern "C" void simt_set_architecture(int cc) {
    simt_device_info().devices[0].cc = cc;
}

extern "C" int simt_supports(const ggml_tensor * node) {
    return ggml_cuda_flash_attn_ext_supported(0, node);
}

extern "C" const char * simt_choose(ggml_tensor * node) {
    ggml_backend_cuda_context ctx(0);
    simt_chosen = "none";
    if (simt_supports(node)) {
        ggml_cuda_flash_attn_ext(ctx, node);
    }
    return simt_chosen;
}

// Bytes that the node's result is allocated with, room for K and V in f16 included.
extern "C" size_t simt_result_bytes(const ggml_tensor * node) {
    return ggml_cuda_flash_attn_ext_get_alloc_size(0, node);
}
