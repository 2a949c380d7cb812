// What the headers of ggml-cuda expect of ggml-cuda.cu: one device, its memory, and errors.
#pragma once

#include "common.cuh"

[[noreturn]] void ggml_cuda_error(const char * stmt, const char * func, const char * file, int line, const char * msg) {
    fprintf(stderr, "simt: %s failed in %s at %s:%d: %s\n", stmt, func, file, line, msg);
    abort();
}

void ggml_cuda_set_device(int) {}

int ggml_cuda_get_device() {
    return 0;
}

// What the one device is; a test may say otherwise.
static ggml_cuda_device_info & simt_device_info() {
    static ggml_cuda_device_info info = []() {
        ggml_cuda_device_info made = {};
        made.device_count = 1;
        made.devices[0].cc        = SIMT_ARCH;
        made.devices[0].nsm       = 4;
        made.devices[0].smpb      = 48 << 10;
        made.devices[0].smpbo     = 96 << 10;
        made.devices[0].warp_size = simt::warp_size;
        return made;
    }();
    return info;
}

const ggml_cuda_device_info & ggml_cuda_info() {
    return simt_device_info();
}

struct simt_pool : ggml_cuda_pool {
    void * alloc(size_t size, size_t * actual) override {
        *actual = size;
        void * p = malloc(size);
        memset(p, 0xA5, size);
        return p;
    }
    void free(void * p, size_t) override {
        ::free(p);
    }
};

std::unique_ptr<ggml_cuda_pool> ggml_backend_cuda_context::new_pool_for_device(int, int) {
    return std::unique_ptr<ggml_cuda_pool>(new simt_pool());
}

ggml_backend_cuda_context::~ggml_backend_cuda_context() {}
