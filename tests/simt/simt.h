// A CUDA device made of one CPU thread: enough of the language to run ggml-cuda's kernels with a C++ compiler.
//
// How to use it. The sources of ggml-cuda are compiled as they are, after tests/simt_build.py has rewritten the two
// things that are not C++: kernel<<<grid, block, shared, stream>>>(...) and `extern __shared__`. The headers beside this
// one (cuda_runtime.h, cuda_fp16.h, ...) take the place of CUDA's; ggml's own headers are the real ones. device.h
// has what those expect of ggml-cuda.cu. A launch runs at once: blocks one after another, and each CUDA thread of a block
// as a fiber, so that a test calls ggml_cuda_op_set_rows(ctx, dst) or launches a kernel and then reads host memory.
// To test another .cu file, name it in tests/simt/device.cpp, and call it from there or from a source of your own.
//
// What is modelled. Warps of 32 lanes; __shfl*_sync, __ballot_sync, __any_sync, __all_sync, __reduce_*_sync, __syncwarp,
// __syncthreads and its kin are rendezvous of exactly the threads that take part: those of the mask (all of the block) that have
// not returned. If some never come, that is a deadlock and aborts with a message. Between rendezvous the order of threads is
// that of their numbers, or with SIMT_ORDER=reverse the reverse: a race that changes results shows as a difference.
// Shared memory is filled with 0xA5 before each block where it is dynamic; static shared variables are C++ statics.
//
// -use_fast_math is modelled where C++ can: kernels run with float32 subnormals flushed to zero (inputs and results),
// and the sources are compiled with contraction of a * b + c allowed. The _rn intrinsics are neither contracted nor
// reordered. Not modelled: approximate division and approximate expf, __expf and so on, which are exact here, and atomics of
// other blocks at the same time.
//
// Architecture: __CUDA_ARCH__ is 800 (SIMT_ARCH), CUDART_VERSION 11.7 (before programmatic launches and FP8), no MMA.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#if !defined(__x86_64__)
#    include <ucontext.h>
#else
#    include <xmmintrin.h>
#endif

#if !defined(SIMT_ARCH)
#    define SIMT_ARCH 800
#endif
#define __CUDA_ARCH__ SIMT_ARCH
#define CUDART_VERSION 11070

#define __global__
#define __device__
#define __host__
#define __constant__
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#if !defined(__clang__)
#    define __builtin_assume(x) ((void) 0)
#endif

// Vectors

#define SIMT_VECTORS(T, name, a2, a4)                                                                        \
    struct alignas(a2) name##2 { T x, y; };                                                                  \
    struct name##3 { T x, y, z; };                                                                           \
    struct alignas(a4) name##4 { T x, y, z, w; };                                                            \
    static inline name##2 make_##name##2(T x, T y) { return { x, y }; }                                      \
    static inline name##3 make_##name##3(T x, T y, T z) { return { x, y, z }; }                              \
    static inline name##4 make_##name##4(T x, T y, T z, T w) { return { x, y, z, w }; }
SIMT_VECTORS(signed char, char, 2, 4)
SIMT_VECTORS(unsigned char, uchar, 2, 4)
SIMT_VECTORS(short, short, 4, 8)
SIMT_VECTORS(unsigned short, ushort, 4, 8)
SIMT_VECTORS(int, int, 8, 16)
SIMT_VECTORS(unsigned int, uint, 8, 16)
SIMT_VECTORS(float, float, 8, 16)
#undef SIMT_VECTORS

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

static uint3 threadIdx, blockIdx;
static dim3  blockDim, gridDim;

namespace simt {

constexpr int    warp_size    = 32;
constexpr size_t stack_bytes  = 128 << 10;
constexpr size_t shared_bytes = 256 << 10;

[[noreturn]] static inline void fail(const char * what) {
    fprintf(stderr, "simt: %s (block %u,%u,%u thread %u,%u,%u of %ux%ux%u)\n", what, blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x,
            threadIdx.y, threadIdx.z, blockDim.x, blockDim.y, blockDim.z);
    fflush(stderr);
    abort();
}

// Float32 subnormals flushed, as -use_fast_math has it.
struct flush {
#if defined(__x86_64__)
    unsigned before = _mm_getcsr();
    flush() { _mm_setcsr(before | 0x8040); }
    ~flush() { _mm_setcsr(before); }
#elif defined(__aarch64__)
    uint64_t before;
    flush() {
        asm volatile("mrs %0, fpcr" : "=r"(before));
        asm volatile("msr fpcr, %0" : : "r"(before | (1 << 24)));
    }
    ~flush() { asm volatile("msr fpcr, %0" : : "r"(before)); }
#else
#    error "simt: no way known to flush subnormals here"
#endif
};

// A value that the compiler knows nothing of: what was rounded stays rounded.
template <typename T> static inline T opaque(T value) {
#if defined(__x86_64__)
    asm volatile("" : "+x"(value));
#else
    asm volatile("" : "+w"(value));
#endif
    return value;
}

// Fibers: one stack each, kept between launches.

#if defined(__x86_64__)

using context = void *; // stack pointer of what was left

asm(R"(
.text
.p2align 4
.local simt_switch
.type simt_switch, @function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size simt_switch, .-simt_switch
)");
extern "C" void simt_switch(context * from, context to);

static inline void leave(context & from, context & to) {
    simt_switch(&from, to);
}

static inline void prepare(context & made, char * stack, void (*entry)()) {
    uintptr_t top = ((uintptr_t) stack + stack_bytes) & ~(uintptr_t) 15;
    void ** frame = (void **) top - 8; // six registers, the entry, and its return address, which it never uses
    memset(frame, 0, 8 * sizeof(void *));
    frame[6] = (void *) entry;
    made = frame;
}

#else

using context = ucontext_t;

static inline void leave(context & from, context & to) {
    swapcontext(&from, &to);
}

static inline void prepare(context & made, char * stack, void (*entry)()) {
    getcontext(&made);
    made.uc_stack.ss_sp   = stack;
    made.uc_stack.ss_size = stack_bytes;
    made.uc_link          = nullptr;
    makecontext(&made, entry, 0);
}

#endif

struct meeting { // of the lanes of one mask
    uint64_t arrived    = 0;
    unsigned generation = 0;
    uint64_t values[2][warp_size];
};

struct warp {
    uint32_t alive = 0;
    std::map<uint32_t, meeting> meetings;
};

struct barrier {
    unsigned arrived    = 0;
    unsigned generation = 0;
    int      count[2]   = { 0, 0 }; // of true predicates
};

struct fiber {
    context where;
    uint3   thread;
    bool    done;
};

static std::vector<char *> stacks;
static std::vector<fiber>  fibers;
static std::vector<warp>   warps;
static barrier             all;
static context             host;
static unsigned            current, alive, idle; // idle: turns since something happened
static bool                backwards;
alignas(128) static char dynamic[shared_bytes];
static void (*body)(void *);
static void *              body_data;

static inline warp & my_warp() {
    return warps[current / warp_size];
}

static inline void complete(warp & w) {
    for (auto & [mask, m] : w.meetings) {
        if (m.arrived != 0 && m.arrived == (mask & w.alive)) {
            m.arrived = 0;
            m.generation++;
            idle = 0;
        }
    }
}

static inline void complete(barrier & b) {
    if (b.arrived != 0 && b.arrived == alive) {
        b.arrived = 0;
        b.generation++;
        b.count[b.generation & 1] = 0;
        idle = 0;
    }
}

static inline void yield() {
    if (alive == 0) {
        context gone;
        leave(gone, host);
    }
    if (++idle > 2 * fibers.size() + 2) {
        fail("deadlock: threads wait for others that returned or wait elsewhere");
    }
    const unsigned from = current;
    const unsigned n    = fibers.size();
    do {
        current = backwards ? (current + n - 1) % n : (current + 1) % n;
    } while (fibers[current].done);
    if (current != from) {
        threadIdx = fibers[current].thread;
        leave(fibers[from].where, fibers[current].where);
    }
}

static void enter() {
    body(body_data);
    fibers[current].done = true;
    alive--;
    idle = 0;
    my_warp().alive &= ~(1u << (current % warp_size));
    complete(my_warp());
    complete(all);
    yield();
    fail("a finished thread was resumed");
}

// Every lane of the mask that has not returned comes here with a value; returns those of all lanes.
static inline const uint64_t * meet(uint32_t mask, uint64_t value) {
    warp & w = my_warp();
    const uint32_t lane = current % warp_size;
    if (!(mask >> lane & 1)) {
        fail("a lane outside its own mask");
    }
    meeting & m = w.meetings[mask];
    const unsigned generation = m.generation;
    m.values[generation & 1][lane] = value;
    m.arrived |= 1u << lane;
    complete(w);
    while (m.generation == generation) {
        yield();
    }
    return m.values[generation & 1];
}

static inline int sync_block(int predicate) {
    const unsigned generation = all.generation;
    all.count[generation & 1] += predicate != 0;
    all.arrived++;
    complete(all);
    while (all.generation == generation) {
        yield();
    }
    return all.count[generation & 1];
}

static inline char * dynamic_shared() {
    return dynamic;
}

struct launch_config {
    dim3   grid, block;
    size_t shared;
    launch_config(dim3 grid_, dim3 block_, size_t shared_ = 0, void * = nullptr) : grid(grid_), block(block_), shared(shared_) {}

    template <typename Kernel> auto run(Kernel kernel) {
        return [this, kernel](auto... arguments) {
            auto call = [&]() { kernel(arguments...); };
            execute([](void * data) { (*(decltype(call) *) data)(); }, &call);
        };
    }

    void execute(void (*what)(void *), void * data) {
        const unsigned n = block.x * block.y * block.z;
        if (n == 0 || n > 1024 || grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535 || grid.x > INT_MAX) {
            fail("a launch that CUDA refuses: size of grid or block");
        }
        if (shared > shared_bytes) {
            fail("more dynamic shared memory than a device has");
        }
        const char * order = getenv("SIMT_ORDER");
        backwards = order && strcmp(order, "reverse") == 0;
        flush flushed;
        body = what;
        body_data = data;
        gridDim = grid;
        blockDim = block;
        while (stacks.size() < n) {
            stacks.push_back((char *) aligned_alloc(4096, stack_bytes));
        }
        fibers.resize(n);
        for (unsigned z = 0; z < grid.z; ++z) {
            for (unsigned y = 0; y < grid.y; ++y) {
                for (unsigned x = 0; x < grid.x; ++x) {
                    blockIdx = { x, y, z };
                    run_block(n);
                }
            }
        }
    }

    void run_block(unsigned n) {
        memset(dynamic, 0xA5, shared);
        warps.assign((n + warp_size - 1) / warp_size, warp());
        all = barrier();
        alive = n;
        idle = 0;
        for (unsigned i = 0; i < n; ++i) {
            fibers[i].done   = false;
            fibers[i].thread = { i % block.x, i / block.x % block.y, i / block.x / block.y };
            warps[i / warp_size].alive |= 1u << (i % warp_size);
            prepare(fibers[i].where, stacks[i], enter);
        }
        current = backwards ? n - 1 : 0;
        threadIdx = fibers[current].thread;
        leave(host, fibers[current].where);
    }
};

template <typename T> static inline uint64_t pack(T value) {
    static_assert(sizeof(T) <= 8, "a shuffle moves up to 8 bytes");
    uint64_t bits = 0;
    memcpy((void *) &bits, (const void *) &value, sizeof(T));
    return bits;
}

template <typename T> static inline T unpack(uint64_t bits) {
    T value;
    memcpy((void *) &value, (const void *) &bits, sizeof(T));
    return value;
}

// Value of lane `from(lane within its segment)`; out of the segment: one's own.
template <typename T, typename From> static inline T shuffle(uint32_t mask, T value, int width, From from) {
    const int lane  = current % warp_size;
    const int first = lane / width * width;
    const int source = from(lane - first);
    const uint64_t * values = meet(mask, pack(value));
    const int at = first + source;
    if (source < 0 || source >= width) {
        return value;
    }
    if (!(mask >> at & 1)) {
        fail("a shuffle from a lane outside the mask");
    }
    return unpack<T>(values[at]);
}

} // namespace simt

// Warps and blocks

template <typename T> static inline T __shfl_sync(uint32_t mask, T v, int source, int width = 32) {
    return simt::shuffle(mask, v, width, [&](int) { return source & (width - 1); });
}
template <typename T> static inline T __shfl_xor_sync(uint32_t mask, T v, int lanes, int width = 32) {
    return simt::shuffle(mask, v, width, [&](int lane) { return lane ^ lanes; });
}
template <typename T> static inline T __shfl_up_sync(uint32_t mask, T v, unsigned delta, int width = 32) {
    return simt::shuffle(mask, v, width, [&](int lane) { return lane - (int) delta; });
}
template <typename T> static inline T __shfl_down_sync(uint32_t mask, T v, unsigned delta, int width = 32) {
    return simt::shuffle(mask, v, width, [&](int lane) { return lane + (int) delta; });
}

static inline unsigned __ballot_sync(uint32_t mask, int predicate) {
    const uint32_t taking = mask & simt::my_warp().alive;
    const uint64_t * values = simt::meet(mask, predicate != 0);
    unsigned ballot = 0;
    for (int i = 0; i < simt::warp_size; ++i) {
        ballot |= (taking >> i & 1 && values[i] ? 1u : 0u) << i;
    }
    return ballot;
}
static inline int __any_sync(uint32_t mask, int predicate) {
    return __ballot_sync(mask, predicate) != 0;
}
static inline int __all_sync(uint32_t mask, int predicate) {
    return __ballot_sync(mask, !predicate) == 0;
}
static inline void __syncwarp(uint32_t mask = 0xffffffffu) {
    simt::meet(mask, 0);
}
static inline unsigned __activemask() {
    simt::fail("__activemask says nothing here");
}

template <typename T, typename Fold> static inline T simt_reduce(uint32_t mask, T value, Fold fold) {
    const uint32_t taking = mask & simt::my_warp().alive;
    const uint64_t * values = simt::meet(mask, simt::pack(value));
    bool first = true;
    T result = value;
    for (int i = 0; i < simt::warp_size; ++i) {
        if (taking >> i & 1) {
            const T other = simt::unpack<T>(values[i]);
            result = first ? other : fold(result, other);
            first = false;
        }
    }
    return result;
}
template <typename T> static inline T __reduce_add_sync(uint32_t mask, T v) {
    return simt_reduce(mask, v, [](T a, T b) { return (T) ((unsigned) a + (unsigned) b); });
}
template <typename T> static inline T __reduce_max_sync(uint32_t mask, T v) {
    return simt_reduce(mask, v, [](T a, T b) { return a > b ? a : b; });
}
template <typename T> static inline T __reduce_min_sync(uint32_t mask, T v) {
    return simt_reduce(mask, v, [](T a, T b) { return a < b ? a : b; });
}
static inline unsigned __reduce_or_sync(uint32_t mask, unsigned v) {
    return simt_reduce(mask, v, [](unsigned a, unsigned b) { return a | b; });
}
static inline unsigned __reduce_xor_sync(uint32_t mask, unsigned v) {
    return simt_reduce(mask, v, [](unsigned a, unsigned b) { return a ^ b; });
}

static inline void __syncthreads() {
    simt::sync_block(0);
}
static inline int __syncthreads_count(int predicate) {
    return simt::sync_block(predicate);
}
static inline int __syncthreads_or(int predicate) {
    return simt::sync_block(predicate) != 0;
}
static inline int __syncthreads_and(int predicate) {
    return simt::sync_block(!predicate) == 0;
}
static inline void __threadfence() {}
static inline void __threadfence_block() {}
[[noreturn]] static inline void __trap() {
    simt::fail("__trap");
}

template <typename T, typename V> static inline T atomicAdd(T * p, V v) {
    const T old = *p;
    *p = old + v;
    return old;
}
template <typename T, typename V> static inline T atomicMax(T * p, V v) {
    const T old = *p;
    *p = old > (T) v ? old : (T) v;
    return old;
}
template <typename T, typename V> static inline T atomicMin(T * p, V v) {
    const T old = *p;
    *p = old < (T) v ? old : (T) v;
    return old;
}

template <typename T> static inline T __ldg(const T * p) {
    return *p;
}

// Arithmetic

#define __expf expf // glibc has declared these names
#define __logf logf
#define __powf powf

static inline float __fmul_rn(float a, float b) { return simt::opaque(simt::opaque(a) * simt::opaque(b)); }
static inline float __fadd_rn(float a, float b) { return simt::opaque(simt::opaque(a) + simt::opaque(b)); }
static inline float __fsub_rn(float a, float b) { return simt::opaque(simt::opaque(a) - simt::opaque(b)); }
static inline float __fdiv_rn(float a, float b) { return simt::opaque(simt::opaque(a) / simt::opaque(b)); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __frcp_rn(float a) { return __fdiv_rn(1.0f, a); }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __saturatef(float a) { return a < 0.0f ? 0.0f : a > 1.0f ? 1.0f : a; }
static inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }
static inline float __int2float_rn(int v) { return (float) v; }
static inline float __uint2float_rn(unsigned v) { return (float) v; }
static inline float __ll2float_rn(long long v) { return (float) v; }
static inline int   __float2int_rn(float v) { return (int) nearbyintf(v); }
static inline int   __float_as_int(float v) { return simt::unpack<int>(simt::pack(v)); }
static inline unsigned __float_as_uint(float v) { return simt::unpack<unsigned>(simt::pack(v)); }
static inline float __int_as_float(int v) { return simt::unpack<float>(simt::pack(v)); }
static inline float __uint_as_float(unsigned v) { return simt::unpack<float>(simt::pack(v)); }

static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned) (((uint64_t) a * b) >> 32); }
static inline int __mulhi(int a, int b) { return (int) (((int64_t) a * b) >> 32); }
static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz((unsigned) v); }
static inline unsigned __brev(unsigned v) {
    unsigned r = 0;
    for (int i = 0; i < 32; ++i) {
        r |= (v >> i & 1) << (31 - i);
    }
    return r;
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned) ((((uint64_t) high << 32) | low) >> (shift & 31));
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (unsigned) (((((uint64_t) high << 32) | low) << (shift & 31)) >> 32);
}

template <typename F> static inline unsigned simt_bytes(unsigned a, unsigned b, F f) {
    unsigned r = 0;
    for (int i = 0; i < 4; ++i) {
        r |= (unsigned) (uint8_t) f((int8_t) (a >> (8 * i)), (int8_t) (b >> (8 * i))) << (8 * i);
    }
    return r;
}
static inline unsigned __vadd4(unsigned a, unsigned b) { return simt_bytes(a, b, [](int8_t x, int8_t y) { return x + y; }); }
static inline unsigned __vsub4(unsigned a, unsigned b) { return simt_bytes(a, b, [](int8_t x, int8_t y) { return x - y; }); }
static inline unsigned __vneg4(unsigned a) { return simt_bytes(a, 0, [](int8_t x, int8_t) { return -x; }); }
static inline unsigned __vcmpeq4(unsigned a, unsigned b) { return simt_bytes(a, b, [](int8_t x, int8_t y) { return x == y ? 0xFF : 0; }); }
static inline unsigned __vcmpne4(unsigned a, unsigned b) { return simt_bytes(a, b, [](int8_t x, int8_t y) { return x != y ? 0xFF : 0; }); }
static inline unsigned __vcmpgts4(unsigned a, unsigned b) { return simt_bytes(a, b, [](int8_t x, int8_t y) { return x > y ? 0xFF : 0; }); }
static inline unsigned __vcmplts4(unsigned a, unsigned b) { return simt_bytes(a, b, [](int8_t x, int8_t y) { return x < y ? 0xFF : 0; }); }

static inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; ++i) {
        c += (int8_t) (a >> (8 * i)) * (int8_t) (b >> (8 * i));
    }
    return c;
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = ((uint64_t) b << 32) | a;
    unsigned r = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned pick = selector >> (4 * i) & 15;
        unsigned byte = (unsigned) (bytes >> (8 * (pick & 7))) & 0xFF;
        if (pick & 8) { // the sign, in every bit
            byte = byte & 0x80 ? 0xFF : 0;
        }
        r |= byte << (8 * i);
    }
    return r;
}

template <typename A, typename B> static inline typename std::common_type<A, B>::type max(A a, B b) {
    using T = typename std::common_type<A, B>::type;
    return (T) a > (T) b ? (T) a : (T) b;
}
template <typename A, typename B> static inline typename std::common_type<A, B>::type min(A a, B b) {
    using T = typename std::common_type<A, B>::type;
    return (T) a < (T) b ? (T) a : (T) b;
}
