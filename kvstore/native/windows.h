/* Windows of 16 bytes, their ranks, and where the index has them. */
#ifndef KVSTORE_WINDOWS_H
#define KVSTORE_WINDOWS_H

#include "bytes.h"
#include "kernel.h"

enum { WINDOW = 16, SPREAD = 32, SAMPLE = SPREAD + WINDOW - 1, MAX_EQUAL = 8 };
/* Slots that are looked at together: one line of the cache. */
enum { BUCKET = 16 };
/* Places that kv_choose takes at once. */
enum { CHOICE = 1024 };

KV_INLINE uint64_t hash_at(const uint8_t *p)
{
    return (load64(p) * UINT64_C(0x9E3779B97F4A7C15) + load64(p + 8)) * UINT64_C(0xD6E8FEB86659FD93);
}

/* The half of a hash that says where it belongs; the list keeps only this. */
KV_INLINE uint32_t list_key(uint64_t h)
{
    return (uint32_t)(h >> 32);
}

/* `key` spread over 0 .. n - 1; n below 2^32. */
KV_INLINE uint64_t spread(uint32_t key, uint64_t n)
{
    return (key * n) >> 32;
}

KV_INLINE int is_pattern(const uint8_t *p)
{
    return load64(p) == load64(p + 8);
}

/* The rank of the window at each of SPREAD places; reads 3 bytes more. */
KV_INLINE void rank(const uint8_t *KV_RESTRICT p, int16_t *KV_RESTRICT out)
{
    for (int i = 0; i < SPREAD; i++) {
        uint16_t x = (uint16_t)(p[i] | p[i + 1] << 8), y = (uint16_t)(p[i + 2] | p[i + 3] << 8);
        x = (uint16_t)(x * 0x9E37u + y * 0x85EBu);
        x = (uint16_t)((x ^ x >> 7) * 0xCA6Bu);
        out[i] = (int16_t)(x ^ x >> 9);
    }
}

/* Bit i: a[i] == b[i], for 32 elements. */
KV_INLINE uint32_t equal_mask(const int16_t *a, const int16_t *b)
{
    uint32_t mask = 0;
#if KV_SSE2
    for (int i = 0; i < 2; i++, a += 16, b += 16) {
        __m128i x = _mm_cmpeq_epi16(_mm_loadu_si128((const __m128i *)a), _mm_loadu_si128((const __m128i *)b));
        __m128i y = _mm_cmpeq_epi16(_mm_loadu_si128((const __m128i *)(a + 8)), _mm_loadu_si128((const __m128i *)(b + 8)));
        mask |= (uint32_t)_mm_movemask_epi8(_mm_packs_epi16(x, y)) << 16 * i;
    }
#else
    for (int i = 0; i < 32; i++)
        mask |= (uint32_t)(a[i] == b[i]) << i;
#endif
    return mask;
}

/* The place of the sample's window that goes into the table: the first of the least rank. */
KV_INLINE uint64_t chosen(const uint8_t *p)
{
    int16_t ranks[SPREAD], least[SPREAD];
    rank(p, ranks);
#if KV_SSE2
    __m128i *r = (__m128i *)ranks, m;
    m = _mm_min_epi16(_mm_min_epi16(_mm_loadu_si128(r), _mm_loadu_si128(r + 1)),
                      _mm_min_epi16(_mm_loadu_si128(r + 2), _mm_loadu_si128(r + 3)));
    m = _mm_min_epi16(m, _mm_shuffle_epi32(m, _MM_SHUFFLE(1, 0, 3, 2)));
    m = _mm_min_epi16(m, _mm_shuffle_epi32(m, _MM_SHUFFLE(2, 3, 0, 1)));
    m = _mm_min_epi16(m, _mm_or_si128(_mm_slli_epi32(m, 16), _mm_srli_epi32(m, 16)));
    for (int i = 0; i < SPREAD / 8; i++)
        _mm_storeu_si128((__m128i *)least + i, m);
#else
    least[0] = ranks[0];
    for (int i = 1; i < SPREAD; i++)
        least[0] = ranks[i] < least[0] ? ranks[i] : least[0];
    for (int i = 1; i < SPREAD; i++)
        least[i] = least[0];
#endif
    return lowest_bit(equal_mask(ranks, least));
}

/* The same for all eight phases of a repeated pattern. */
KV_INLINE uint64_t any_phase(uint64_t x)
{
    uint64_t least = x;
    for (int i = 1; i < 8; i++) {
        uint64_t turned = x << (8 * i) | x >> (64 - 8 * i);
        if (turned < least)
            least = turned;
    }
    return least;
}

KV_INLINE kv_pattern *pattern_of(kv_index *x, uint64_t phase_free)
{
    return &x->patterns[phase_free * UINT64_C(0x9E3779B97F4A7C15) >> 58];
}

/* [start, end): the stretch around `at` of p[from, to) in which every byte equals the one 8 before it, or 8 behind. */
KV_INLINE void stretch(const uint8_t *p, uint64_t from, uint64_t to, uint64_t at, uint64_t *start, uint64_t *end)
{
    *end = at + 8 + equal_bytes(p + at, p + at + 8, to - at - 8);
    *start = at - equal_bytes_before(p + at, p + at + 8, at - from);
}

/* The first slot of the bucket where a hash belongs; a bucket that is full goes on in the next. */
KV_INLINE uint64_t bucket_of(const kv_index *x, uint64_t h)
{
    return spread(list_key(h), x->n_table / BUCKET) * BUCKET;
}

KV_INLINE uint64_t next_bucket(const kv_index *x, uint64_t bucket)
{
    return bucket + BUCKET == x->n_table ? 0 : bucket + BUCKET;
}

/* The part of a hash that a slot keeps; the rest of a slot is the number of the sample, from 1. */
KV_INLINE uint32_t tag_of(const kv_index *x, uint64_t h)
{
    return (uint32_t)h & ~x->index_mask;
}

/* Bit i: slot i of the bucket is free, or is not and has this tag. */
KV_INLINE void match(const kv_index *x, uint64_t bucket, uint32_t tag, uint32_t *equal, uint32_t *empty)
{
    const uint32_t *slots = x->table + bucket;
#if KV_SSE2
    const __m128i mask = _mm_set1_epi32((int)~x->index_mask), wanted = _mm_set1_epi32((int)tag), zero = _mm_setzero_si128();
    __m128i e[4], z[4];
    for (int i = 0; i < 4; i++) {
        __m128i v = _mm_loadu_si128((const __m128i *)slots + i);
        e[i] = _mm_cmpeq_epi32(_mm_and_si128(v, mask), wanted);
        z[i] = _mm_cmpeq_epi32(v, zero);
    }
    *equal = (uint32_t)_mm_movemask_epi8(_mm_packs_epi16(_mm_packs_epi32(e[0], e[1]), _mm_packs_epi32(e[2], e[3])));
    *empty = (uint32_t)_mm_movemask_epi8(_mm_packs_epi16(_mm_packs_epi32(z[0], z[1]), _mm_packs_epi32(z[2], z[3])));
#else
    *equal = *empty = 0;
    for (int i = 0; i < BUCKET; i++) {
        *equal |= (uint32_t)((slots[i] & ~x->index_mask) == tag) << i;
        *empty |= (uint32_t)(slots[i] == 0) << i;
    }
#endif
    *equal &= ~*empty;
}

/* The filter has three bits of one word for each key. */
KV_INLINE uint32_t filter_bits(uint32_t key)
{
    return UINT32_C(1) << (key & 31) | UINT32_C(1) << (key >> 5 & 31) | UINT32_C(1) << (key >> 10 & 31);
}

KV_INLINE uint32_t *filter_word(const kv_index *x, uint32_t key)
{
    return x->filter + spread(key, x->n_filter);
}

/* The place of the window that a slot stands for. */
KV_INLINE uint64_t place_of(const kv_index *x, const uint8_t *parent, uint32_t held)
{
    const uint64_t at = ((held & x->index_mask) - UINT64_C(1)) * x->stride;
    return at + chosen(parent + at);
}

/* Code that compilers make faster for newer machines: KV_AVX2 before a function, has_avx2() before its call. */
#if KV_SSE2 && defined(__GNUC__) && defined(__x86_64__)
#define KV_AVX2 __attribute__((target("avx2")))
KV_INLINE int has_avx2(void)
{
    return __builtin_cpu_supports("avx2") != 0;
}
#else
#define KV_AVX2
KV_INLINE int has_avx2(void)
{
    return 0;
}
#endif

/* From one group of places to the next: every KV_MIN_RUN equal bytes have a whole one. */
KV_INLINE uint64_t group_step(const kv_index *x)
{
    return KV_MIN_RUN - x->stride - SAMPLE + 2;
}

/* screen.c: the places in p[0, n + SPREAD - 1) whose rank is the least of SPREAD neighbours that begin in p[0, n);
 * ascending. n is at most CHOICE. Gives their number, at most n + SPREAD. */
unsigned kv_choose(const uint8_t *p, unsigned n, uint16_t *places);

#endif
