/* Copying around the cache: the lines that a large output fills are not read first. glibc's memcpy does so only for single
 * calls of some 24 MB, which ops rarely are. */
#ifndef KVSTORE_STREAM_H
#define KVSTORE_STREAM_H

#include "bytes.h"

/* Outputs of this size and more are worth it. */
#define STREAM_FROM (UINT64_C(8) << 20)

#if KV_SSE2
KV_INLINE void stream_line(uint8_t *to, const uint8_t *from)
{
    __m128i a = _mm_loadu_si128((const __m128i *)from);
    __m128i b = _mm_loadu_si128((const __m128i *)(from + 16));
    __m128i c = _mm_loadu_si128((const __m128i *)(from + 32));
    __m128i d = _mm_loadu_si128((const __m128i *)(from + 48));
    _mm_stream_si128((__m128i *)to, a);
    _mm_stream_si128((__m128i *)(to + 16), b);
    _mm_stream_si128((__m128i *)(to + 32), c);
    _mm_stream_si128((__m128i *)(to + 48), d);
}

/* Copies the whole lines of 64 bytes among n bytes; `to` is aligned to 64. Where there are pages enough, several are copied
 * side by side, which more memory channels work for: 200 MiB took 18 ms instead of 23. */
KV_INLINE void stream_lines(uint8_t *to, const uint8_t *from, uint64_t n)
{
    enum { PAGE = 4096 };
    for (; n >= 4 * PAGE; n -= 4 * PAGE, from += 4 * PAGE, to += 4 * PAGE)
        for (unsigned i = 0; i < PAGE; i += 64)
            for (unsigned k = 0; k < 4 * PAGE; k += PAGE)
                stream_line(to + i + k, from + i + k);
    for (; n >= 2 * PAGE; n -= 2 * PAGE, from += 2 * PAGE, to += 2 * PAGE)
        for (unsigned i = 0; i < PAGE; i += 64)
            for (unsigned k = 0; k < 2 * PAGE; k += PAGE)
                stream_line(to + i + k, from + i + k);
    for (; n >= 64; n -= 64, from += 64, to += 64)
        stream_line(to, from);
}
#endif

#endif
