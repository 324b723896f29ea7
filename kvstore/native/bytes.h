/* Reading, writing and comparing bytes. */
#ifndef KVSTORE_BYTES_H
#define KVSTORE_BYTES_H

#include <stdint.h>
#include <string.h>

/* KV_SCALAR leaves the plain code alone, to compare with. */
#if defined(KV_SCALAR)
#define KV_SSE2 0
#elif defined(__SSE2__) || defined(_M_X64) || (defined(_M_IX86_FP) && _M_IX86_FP >= 2)
#include <emmintrin.h>
#define KV_SSE2 1
#else
#define KV_SSE2 0
#endif

#if defined(_MSC_VER) && !defined(__clang__)
#define KV_INLINE static __forceinline
#define KV_RESTRICT __restrict
#elif defined(__GNUC__)
#define KV_INLINE static inline __attribute__((always_inline))
#define KV_RESTRICT restrict
#else
#define KV_INLINE static inline
#define KV_RESTRICT restrict
#endif

#if KV_SSE2
#define PREFETCH(p) _mm_prefetch((const char *)(p), _MM_HINT_T0)
#else
#define PREFETCH(p) ((void)(p))
#endif

KV_INLINE uint64_t load64(const uint8_t *p)
{
    uint64_t x;
    memcpy(&x, p, 8);
    return x;
}

/* Little-endian, as the format has it. */
KV_INLINE uint64_t get64(const uint8_t *p)
{
    uint64_t x = 0;
    for (int i = 7; i >= 0; i--)
        x = x << 8 | p[i];
    return x;
}

KV_INLINE void set64(uint8_t *p, uint64_t x)
{
    for (int i = 0; i < 8; i++)
        p[i] = (uint8_t)(x >> (8 * i));
}

/* The index of the lowest set bit; x is not 0. */
KV_INLINE unsigned lowest_bit(uint64_t x)
{
#if defined(__GNUC__)
    return (unsigned)__builtin_ctzll(x);
#else
    unsigned n = 0;
    for (; !(x & 0xff); x >>= 8)
        n += 8;
    for (; !(x & 1); x >>= 1)
        n++;
    return n;
#endif
}

/* The number of leading bytes that are equal. */
KV_INLINE uint64_t equal_bytes(const uint8_t *a, const uint8_t *b, uint64_t n)
{
    uint64_t i = 0;
    if (n >= 8 && load64(a) != load64(b))
        n = 8;
    /* memcmp is as fast as the memory, but does not say where: hence in blocks. */
    while (n - i >= 64) {
        uint64_t block = n - i < 4096 ? n - i : 4096;
        if (memcmp(a + i, b + i, (size_t)block) != 0)
            break;
        i += block;
    }
    while (n - i >= 8 && load64(a + i) == load64(b + i))
        i += 8;
    while (i < n && a[i] == b[i])
        i++;
    return i;
}

/* The number of equal bytes just before a and b, at most n. */
KV_INLINE uint64_t equal_bytes_before(const uint8_t *a, const uint8_t *b, uint64_t n)
{
    uint64_t i = 0;
    while (n - i >= 4096 && memcmp(a - i - 4096, b - i - 4096, 4096) == 0)
        i += 4096;
    while (n - i >= 8 && load64(a - i - 8) == load64(b - i - 8))
        i += 8;
    while (i < n && *(a - i - 1) == *(b - i - 1))
        i++;
    return i;
}

#endif
