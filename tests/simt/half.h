// half, bfloat16 and their pairs: each operation in float32, then rounded to nearest even, which is what a device gives.
#pragma once

#include "simt.h"

struct __half_raw {
    unsigned short x;
};

struct __half {
    _Float16 value;
    __half() = default;
    __half(float v) : value((_Float16) v) {}
    __half(double v) : value((_Float16) v) {}
    __half(int v) : value((_Float16) (float) v) {}
    __half(unsigned v) : value((_Float16) (float) v) {}
    __half(__half_raw raw) { memcpy(&value, &raw, 2); }
    operator float() const { return (float) value; }
    operator __half_raw() const {
        __half_raw raw;
        memcpy(&raw, &value, 2);
        return raw;
    }
};

struct alignas(4) __half2 {
    __half x, y;
    __half2() = default;
    __half2(__half a, __half b) : x(a), y(b) {}
};

using half  = __half;
using half2 = __half2;

static inline half  __float2half(float v) { return half(v); }
static inline half  __float2half_rn(float v) { return half(v); }
static inline float __half2float(half v) { return (float) v.value; }
static inline half  __int2half_rn(int v) { return half(v); }
static inline half  __ushort_as_half(unsigned short v) { return half(__half_raw{ v }); }
static inline unsigned short __half_as_ushort(half v) { return ((__half_raw) v).x; }

static inline half operator+(half a, half b) { return half((float) a + (float) b); }
static inline half operator-(half a, half b) { return half((float) a - (float) b); }
static inline half operator*(half a, half b) { return half((float) a * (float) b); }
static inline half operator/(half a, half b) { return half((float) a / (float) b); }
static inline half operator-(half a) { return half(-(float) a); }
static inline half & operator+=(half & a, half b) { return a = a + b; }
static inline half & operator*=(half & a, half b) { return a = a * b; }
static inline half __hadd(half a, half b) { return a + b; }
static inline half __hsub(half a, half b) { return a - b; }
static inline half __hmul(half a, half b) { return a * b; }
static inline half __hmax(half a, half b) { return half(fmaxf((float) a, (float) b)); }
static inline half __hmin(half a, half b) { return half(fminf((float) a, (float) b)); }
static inline half __hfma(half a, half b, half c) { return half((double) (float) a * (double) (float) b + (double) (float) c); }

static inline half2  make_half2(half a, half b) { return { a, b }; }
static inline half2  __halves2half2(half a, half b) { return { a, b }; }
static inline half2  __half2half2(half a) { return { a, a }; }
static inline half2  __float2half2_rn(float a) { return { half(a), half(a) }; }
static inline half2  __floats2half2_rn(float a, float b) { return { half(a), half(b) }; }
static inline half2  __float22half2_rn(float2 a) { return { half(a.x), half(a.y) }; }
static inline float2 __half22float2(half2 a) { return { (float) a.x, (float) a.y }; }
static inline float  __low2float(half2 a) { return (float) a.x; }
static inline float  __high2float(half2 a) { return (float) a.y; }
static inline half   __low2half(half2 a) { return a.x; }
static inline half   __high2half(half2 a) { return a.y; }

static inline half2 operator+(half2 a, half2 b) { return { a.x + b.x, a.y + b.y }; }
static inline half2 operator-(half2 a, half2 b) { return { a.x - b.x, a.y - b.y }; }
static inline half2 operator*(half2 a, half2 b) { return { a.x * b.x, a.y * b.y }; }
static inline half2 & operator+=(half2 & a, half2 b) { return a = a + b; }
static inline half2 & operator*=(half2 & a, half2 b) { return a = a * b; }
static inline half2 __hadd2(half2 a, half2 b) { return a + b; }
static inline half2 __hsub2(half2 a, half2 b) { return a - b; }
static inline half2 __hmul2(half2 a, half2 b) { return a * b; }
static inline half2 __hmax2(half2 a, half2 b) { return { __hmax(a.x, b.x), __hmax(a.y, b.y) }; }
static inline half2 __hmin2(half2 a, half2 b) { return { __hmin(a.x, b.x), __hmin(a.y, b.y) }; }
static inline half2 __hfma2(half2 a, half2 b, half2 c) { return { __hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y) }; }

struct __nv_bfloat16 {
    unsigned short bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float v) {
        const unsigned u = __float_as_uint(v);
        bits = (u & 0x7FFFFFFF) > 0x7F800000 ? 0x7FFF : (unsigned short) ((u + 0x7FFF + (u >> 16 & 1)) >> 16);
    }
    operator float() const { return __uint_as_float((unsigned) bits << 16); }
};

struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
    __nv_bfloat162() = default;
    __nv_bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) : x(a), y(b) {}
};

using nv_bfloat16  = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

static inline nv_bfloat16 __float2bfloat16(float v) { return nv_bfloat16(v); }
static inline nv_bfloat16 __float2bfloat16_rn(float v) { return nv_bfloat16(v); }
static inline float       __bfloat162float(nv_bfloat16 v) { return (float) v; }
static inline float2      __bfloat1622float2(nv_bfloat162 v) { return { (float) v.x, (float) v.y }; }
static inline nv_bfloat16 __low2bfloat16(nv_bfloat162 v) { return v.x; }
static inline nv_bfloat16 __high2bfloat16(nv_bfloat162 v) { return v.y; }
