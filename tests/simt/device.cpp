// The device as a shared library: simt_compute runs one node of a ggml graph whose tensors lie in host memory.
#include "device.h"

#include "kvq.cu"
#include "set-rows.cu"
#include "cpy.cu"
#include "getrows.cu"
#include "convert.cu"

extern "C" int simt_compute(ggml_tensor * node) {
    ggml_backend_cuda_context ctx(0);
    switch (node->op) {
        case GGML_OP_SET_ROWS: ggml_cuda_op_set_rows(ctx, node);        return 1;
        case GGML_OP_GET_ROWS: ggml_cuda_op_get_rows(ctx, node);        return 1;
        case GGML_OP_CPY:      ggml_cuda_cpy(ctx, node->src[0], node->src[1]); return 1;
        default:               return 0;
    }
}

// Dequantizes k values in a row; kind: GGML_TYPE_F32, F16 or BF16. 0 if there is no kernel.
extern "C" int simt_convert(int type, int kind, const void * x, void * y, int64_t k) {
    const auto run = [&](auto convert, auto * out) {
        if (convert) {
            convert(x, out, k, nullptr);
        }
        return convert != nullptr;
    };
    switch (kind) {
        case GGML_TYPE_F32:  return run(ggml_get_to_fp32_cuda((ggml_type) type), (float *) y);
        case GGML_TYPE_F16:  return run(ggml_get_to_fp16_cuda((ggml_type) type), (half *) y);
        case GGML_TYPE_BF16: return run(ggml_get_to_bf16_cuda((ggml_type) type), (nv_bfloat16 *) y);
        default:             return 0;
    }
}

// The same of rows that lie apart: ne extents, s strides in blocks.
extern "C" int simt_convert_nc(int type, int kind, const void * x, void * y, const int64_t * ne, const int64_t * s) {
    const auto run = [&](auto convert, auto * out) {
        if (convert) {
            convert(x, out, ne[0], ne[1], ne[2], ne[3], s[0], s[1], s[2], nullptr);
        }
        return convert != nullptr;
    };
    switch (kind) {
        case GGML_TYPE_F32:  return run(ggml_get_to_fp32_nc_cuda((ggml_type) type), (float *) y);
        case GGML_TYPE_F16:  return run(ggml_get_to_fp16_nc_cuda((ggml_type) type), (half *) y);
        case GGML_TYPE_BF16: return run(ggml_get_to_bf16_nc_cuda((ggml_type) type), (nv_bfloat16 *) y);
        default:             return 0;
    }
}

// GET_ROWS into f16 or bf16, which ggml_get_rows does not make.
extern "C" void simt_get_rows(int type, int kind, const void * x, const int32_t * rows, void * y, int64_t width, int64_t n, size_t nb01) {
    const size_t row = width * ggml_type_size((ggml_type) kind);
    get_rows_cuda(x, (ggml_type) type, rows, y, (ggml_type) kind, width, nb01, 0, 0, n, 1, 1, 4, 4 * n, 4 * n, row, row * n, row * n, nullptr);
}
