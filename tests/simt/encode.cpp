// Only our own kernels, for tests that compile them changed.
#include "device.h"

#include "kvq.cu"

extern "C" int simt_compute(ggml_tensor * node) {
    ggml_backend_cuda_context ctx(0);
    return ggml_cuda_kvq_set_rows(ctx, node);
}

extern "C" int simt_convert(int type, const void * x, float * y, int64_t k) {
    const auto convert = ggml_cuda_kvq_converter<float>((ggml_type) type);
    if (convert) {
        convert(x, y, k, nullptr);
    }
    return convert != nullptr;
}
