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
