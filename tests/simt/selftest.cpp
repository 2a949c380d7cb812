// Small kernels that show what the host's CUDA device does: tests/test_simt.py.
#include "half.h"

static void sum_lanes(const int * x, int * sums, int * picked, unsigned * ballots) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    int sum = x[i];
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    }
    sums[i] = sum;
    picked[4 * i + 0] = __shfl_sync(0xffffffffu, x[i], 3, 8);
    picked[4 * i + 1] = __shfl_up_sync(0xffffffffu, x[i], 2u, 16);
    picked[4 * i + 2] = __shfl_down_sync(0xffffffffu, x[i], 5u);
    picked[4 * i + 3] = __reduce_max_sync(0xffffffffu, x[i]);
    ballots[i] = __ballot_sync(0xffffffffu, x[i] & 1);
}

extern "C" void run_sum_lanes(int blocks, int threads, const int * x, int * sums, int * picked, unsigned * ballots) {
    simt::launch_config(blocks, threads).run([](auto... a) { sum_lanes(a...); })(x, sums, picked, ballots);
}

// Sums before each element of a block, by way of shared memory.
static void scan(const int * x, int * y) {
    int * shared = (int *) simt::dynamic_shared();
    const unsigned i = threadIdx.y * blockDim.x + threadIdx.x;
    shared[i] = x[i];
    __syncthreads();
    for (unsigned step = 1; step < blockDim.x * blockDim.y; step *= 2) {
        const int add = i >= step ? shared[i - step] : 0;
        __syncthreads();
        shared[i] += add;
        __syncthreads();
    }
    y[i] = shared[i];
}

extern "C" void run_scan(int nx, int ny, const int * x, int * y) {
    simt::launch_config(1, dim3(nx, ny), nx * ny * sizeof(int)).run([](auto... a) { scan(a...); })(x, y);
}

// Half of a warp leaves; the others still meet.
static void leavers(int * y) {
    if (threadIdx.x % 2) {
        return;
    }
    y[threadIdx.x] = __popc(__ballot_sync(0xffffffffu, 1));
    __syncthreads();
    y[threadIdx.x] += 100;
}

extern "C" void run_leavers(int * y) {
    simt::launch_config(1, 64).run([](auto... a) { leavers(a...); })(y);
}

// No barrier between the write and the reads.
static void race(int * y) {
    static int shared; // what __shared__ means here
    if (threadIdx.x == 0) {
        shared = blockIdx.x + 1;
    }
    y[blockIdx.x * blockDim.x + threadIdx.x] = shared;
}

extern "C" void run_race(int * y) {
    simt::launch_config(2, 32).run([](auto... a) { race(a...); })(y);
}

static void arithmetic(float a, float b, float c, float * y) {
    y[0] = a * b + c;
    y[1] = __fadd_rn(__fmul_rn(a, b), c);
    volatile float tiny = 1e-40f;
    y[2] = tiny * 1e10f;
    y[3] = __fmul_rn(1e-30f, 1e-10f);
    y[4] = __half2float(__float2half(6e-8f)); // a subnormal half
}

extern "C" void run_arithmetic(float a, float b, float c, float * y) {
    simt::launch_config(1, 1).run([](auto... x) { arithmetic(x...); })(a, b, c, y);
    y[5] = 1e-40f;
    y[5] *= 1.0f; // outside a kernel: kept
}

static void stuck() {
    if (threadIdx.x < 16) {
        __syncthreads();
    } else {
        __syncwarp();
    }
}

extern "C" void run_stuck() {
    simt::launch_config(1, 32).run([](auto... a) { stuck(a...); })();
}

extern "C" void run_too_large() {
    simt::launch_config(1, 2048).run([](auto... a) { stuck(a...); })();
}
