// What ggml-cuda says that it can do, and by which kernel it multiplies: the functions of its sources that decide, without the rest of
// those files, which the test leaves out (tests/test_cuda_dispatch.py).
#include "device.h"
#include "ggml-backend-impl.h"
#include "mmvf.cuh"
#include "mmvq.cuh"

#include "kvq.cu"

static const char * simt_chosen;

struct ggml_backend_cuda_device_context {
    int device;
};
struct ggml_backend_cuda_buffer_type_context {
    int device;
};
static bool ggml_backend_buft_is_cuda(ggml_backend_buffer_type_t) {
    return false;
}
static bool ggml_cuda_flash_attn_ext_supported(int, const ggml_tensor *) {
    return true;
}
static bool ggml_cuda_lightning_indexer_supported(int, const ggml_tensor *) {
    return false;
}
bool ggml_cuda_should_use_mmq(enum ggml_type type, int cc, int64_t ne11, int64_t n_experts);
bool ggml_cuda_should_use_mmf(enum ggml_type type, int cc, int warp_size, const int64_t * src0_ne, const size_t * src0_nb, const int ncols, bool id);
bool ggml_cuda_op_mul_mat_use_fwht(const struct ggml_tensor * op);
bool ggml_cuda_op_fwht(ggml_backend_cuda_context &, const ggml_tensor *, ggml_tensor *) {
    return false;
}

#define SIMT_CHOICE(function, name) \
    template <typename... Args> static void function(Args &&...) { simt_chosen = name; }
SIMT_CHOICE(ggml_cuda_mul_mat_vec_f_simt, "mmvf")
SIMT_CHOICE(ggml_cuda_mul_mat_f, "mmf")
SIMT_CHOICE(ggml_cuda_mul_mat_vec_q_simt, "mmvq")
SIMT_CHOICE(ggml_cuda_mul_mat_q, "mmq")
SIMT_CHOICE(ggml_cuda_mul_mat_cublas, "cublas")
#define ggml_cuda_mul_mat_vec_f ggml_cuda_mul_mat_vec_f_simt // declared by the headers
#define ggml_cuda_mul_mat_vec_q ggml_cuda_mul_mat_vec_q_simt
#define ggml_backend_buffer_get_usage(buffer) GGML_BACKEND_BUFFER_USAGE_ANY // tensors of these tests have no buffer

#include "fwht.cu"
#include "mmf.cuh"
#include "mmf.cu"
#include "mmq.cuh"
#include "mmq.cu"
#include "mmvf.cu"
#include "mmvq.cu"
#include "ggml-cuda.cu"

extern "C" int simt_supports(const ggml_tensor * op) {
    ggml_backend_cuda_device_context context = { 0 };
    ggml_backend_device device = {};
    device.context = &context;
    return ggml_backend_cuda_device_supports_op(&device, op);
}

// Which kernel multiplies, on a GPU of this generation (800: Ampere).
extern "C" const char * simt_mul_mat(ggml_tensor * dst, int cc) {
    ggml_cuda_device_info & info = const_cast<ggml_cuda_device_info &>(ggml_cuda_info());
    info.devices[0].cc = cc;
    simt_chosen = "none";
    ggml_backend_cuda_context ctx(0);
    ggml_cuda_mul_mat(ctx, dst->src[0], dst->src[1], dst);
    return simt_chosen;
}
