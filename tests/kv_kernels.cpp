// A device that answers as the test says, and what libllama makes of it: compiled with the tree's llama-kv-kernels.cpp.
#include "llama-kv-kernels.cpp"

#include "ggml-backend-impl.h"

#include <vector>

using supports_t = int (*)(const ggml_tensor *);

static supports_t                       supports;
static std::vector<ggml_backend_feature> features;

static void * proc_address(ggml_backend_reg_t, const char * name) {
    if (strcmp(name, "ggml_backend_get_features") == 0 && !features.empty()) {
        return (void *) (ggml_backend_get_features_t) [](ggml_backend_reg_t) { return features.data(); };
    }
    return nullptr;
}

static ggml_backend_device * device() {
    static ggml_backend_reg    reg = {};
    static ggml_backend_device dev = {};
    reg.iface.get_proc_address = proc_address;
    dev.iface.get_name         = [](ggml_backend_dev_t) { return "GPU0"; };
    dev.iface.supports_op      = [](ggml_backend_dev_t, const ggml_tensor * op) { return supports(op) != 0; };
    dev.reg                    = &reg;
    return &dev;
}

// pairs null: a backend that lists none
extern "C" const char * kv_fault(supports_t answer, const char * pairs, const char * sizes, int k, int v, int head_k, int head_v, int heads, int kv_heads) {
    static std::string said;
    supports = answer;
    features.clear();
    if (pairs) {
        features = { { "FA_KVQ", pairs }, { "FA_KVQ_HEADS", sizes }, { nullptr, nullptr } };
    }
    said = llama_kv_kernels_fault(device(), { (ggml_type) k, (ggml_type) v, head_k, head_v, heads, kv_heads, 0.0f, 0.0f });
    return said.c_str();
}

extern "C" int kv_can_write(supports_t answer, int type) {
    supports = answer;
    return llama_kv_kernels_can_write(device(), (ggml_type) type);
}
