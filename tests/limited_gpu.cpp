// A "GPU" for llama.cpp that computes on the CPU and knows less: what it refuses comes from the environment.
//   LIMITED_ATTENTION  K types, separated by commas, that it has no flash attention for
//   LIMITED_ROWS       types that it cannot write
//   LIMITED_PAIRS      what it lists as FA_KVQ
// Loaded through GGML_BACKEND_PATH.
#define GGML_BACKEND_DL
#define GGML_BACKEND_SHARED
#define GGML_BACKEND_BUILD
#include "ggml-backend-impl.h"
#include "ggml-cpu.h"

#include <cstdlib>
#include <string>

static bool listed(const char * variable, const char * name) {
    const char * value = getenv(variable);
    return value && ("," + std::string(value) + ",").find("," + std::string(name) + ",") != std::string::npos;
}

static ggml_backend_dev_t cpu() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

static bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    if (op->op == GGML_OP_FLASH_ATTN_EXT && listed("LIMITED_ATTENTION", ggml_type_name(op->src[1]->type))) {
        return false;
    }
    if (op->op == GGML_OP_SET_ROWS && listed("LIMITED_ROWS", ggml_type_name(op->type))) {
        return false;
    }
    return ggml_backend_dev_supports_op(cpu(), op);
}

static ggml_backend_t init_backend(ggml_backend_dev_t dev, const char *) {
    static ggml_guid guid = { 0x6b, 0x76, 0x71, 0x2d, 0x6c, 0x69, 0x6d, 0x69, 0x74, 0x65, 0x64, 0x2d, 0x67, 0x70, 0x75, 0x00 };
    ggml_backend_i iface = {};
    iface.get_name = [](ggml_backend_t) { return "Limited"; };
    iface.free = [](ggml_backend_t backend) {
        ggml_backend_free((ggml_backend_t) backend->context);
        delete backend;
    };
    iface.graph_compute = [](ggml_backend_t backend, ggml_cgraph * graph) { return ggml_backend_graph_compute((ggml_backend_t) backend->context, graph); };
    return new ggml_backend{ &guid, iface, dev, ggml_backend_dev_init(cpu(), nullptr) };
}

static ggml_backend_device * device() {
    static ggml_backend_device dev = {};
    dev.iface.get_name        = [](ggml_backend_dev_t) { return "Limited0"; };
    dev.iface.get_description = [](ggml_backend_dev_t) { return "the CPU, less what it is told not to know"; };
    dev.iface.get_memory      = [](ggml_backend_dev_t, size_t * free, size_t * total) { *free = *total = (size_t) 8 << 30; };
    dev.iface.get_type        = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; };
    dev.iface.get_props       = [](ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
        *props = {};
        props->name        = dev->iface.get_name(dev);
        props->description = dev->iface.get_description(dev);
        props->type        = dev->iface.get_type(dev);
        dev->iface.get_memory(dev, &props->memory_free, &props->memory_total);
    };
    dev.iface.init_backend    = init_backend;
    dev.iface.get_buffer_type = [](ggml_backend_dev_t) { return ggml_backend_cpu_buffer_type(); };
    dev.iface.supports_op     = supports_op;
    dev.iface.supports_buft   = [](ggml_backend_dev_t, ggml_backend_buffer_type_t buft) { return ggml_backend_buft_is_host(buft); };
    return &dev;
}

static ggml_backend_reg_t limited_reg() {
    static ggml_backend_reg reg = {};
    reg.api_version            = GGML_BACKEND_API_VERSION;
    reg.iface.get_name         = [](ggml_backend_reg_t) { return "Limited"; };
    reg.iface.get_device_count = [](ggml_backend_reg_t) { return (size_t) 1; };
    reg.iface.get_device       = [](ggml_backend_reg_t, size_t) { return (ggml_backend_dev_t) device(); };
    reg.iface.get_proc_address = [](ggml_backend_reg_t, const char * name) -> void * {
        static ggml_backend_feature features[] = { { "FA_KVQ", getenv("LIMITED_PAIRS") }, { "FA_KVQ_HEADS", "64,128,256" }, { nullptr, nullptr } };
        if (std::string(name) == "ggml_backend_get_features" && features[0].value) {
            return (void *) (ggml_backend_get_features_t) [](ggml_backend_reg_t) { return features; };
        }
        return nullptr;
    };
    device()->reg = &reg;
    return &reg;
}

GGML_BACKEND_DL_IMPL(limited_reg)
