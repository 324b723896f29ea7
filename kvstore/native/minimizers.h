/* K-mers, minimizers, and the table of seeds. The terms are those of winnowing (Schleimer, Wilkerson and Aiken, 2003):
 *
 *   k-mer        KMER consecutive bytes; its position is that of its first byte
 *   order        a 16-bit hash of a k-mer's first four bytes
 *   window       WINDOW consecutive k-mers, which span WINDOW_BYTES bytes; its position is that of its first k-mer
 *   minimizer    the k-mer of least order in a window, the first of them where several are equal
 *   seed         the minimizer of a window of the parent; the windows begin at every stride-th byte
 *   probe        `stride` consecutive windows of the child: if their bytes equal parent bytes, one of them has a seed
 *   literal gap  bytes of the child between two spans that the parent is known to have */
#ifndef KVSTORE_MINIMIZERS_H
#define KVSTORE_MINIMIZERS_H

#include "bytes.h"
#include "kernel.h"

enum { KMER = 16, WINDOW = 32, WINDOW_BYTES = WINDOW + KMER - 1, MAX_EQUAL = 8 };
/* Slots that one comparison covers: a cache line. */
enum { BUCKET = 16 };
/* The most windows that one call of kv_winnow takes. */
enum { WINNOW_MAX = 1024 };

KV_INLINE uint64_t hash_at(const uint8_t *p)
{
    return (load64(p) * UINT64_C(0x9E3779B97F4A7C15) + load64(p + 8)) * UINT64_C(0xD6E8FEB86659FD93);
}

/* The half of a hash that selects a bucket or a word of the filter. The seed list keeps this half only. */
KV_INLINE uint32_t seed_key(uint64_t h)
{
    return (uint32_t)(h >> 32);
}

/* Maps `key` evenly to 0 .. n - 1; n is below 2^32. */
KV_INLINE uint64_t to_range(uint32_t key, uint64_t n)
{
    return (key * n) >> 32;
}

KV_INLINE int is_periodic(const uint8_t *p)
{
    return load64(p) == load64(p + 8);
}

/* The orders of the WINDOW k-mers from p on; reads WINDOW + 3 bytes. */
KV_INLINE void order(const uint8_t *KV_RESTRICT p, int16_t *KV_RESTRICT out)
{
    for (int i = 0; i < WINDOW; i++) {
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

/* The minimizer of the window at p: its position in the window. */
KV_INLINE uint64_t minimizer(const uint8_t *p)
{
    int16_t orders[WINDOW], least[WINDOW];
    order(p, orders);
#if KV_SSE2
    __m128i *r = (__m128i *)orders, m;
    m = _mm_min_epi16(_mm_min_epi16(_mm_loadu_si128(r), _mm_loadu_si128(r + 1)),
                      _mm_min_epi16(_mm_loadu_si128(r + 2), _mm_loadu_si128(r + 3)));
    m = _mm_min_epi16(m, _mm_shuffle_epi32(m, _MM_SHUFFLE(1, 0, 3, 2)));
    m = _mm_min_epi16(m, _mm_shuffle_epi32(m, _MM_SHUFFLE(2, 3, 0, 1)));
    m = _mm_min_epi16(m, _mm_or_si128(_mm_slli_epi32(m, 16), _mm_srli_epi32(m, 16)));
    for (int i = 0; i < WINDOW / 8; i++)
        _mm_storeu_si128((__m128i *)least + i, m);
#else
    least[0] = orders[0];
    for (int i = 1; i < WINDOW; i++)
        least[0] = orders[i] < least[0] ? orders[i] : least[0];
    for (int i = 1; i < WINDOW; i++)
        least[i] = least[0];
#endif
    return lowest_bit(equal_mask(orders, least));
}

/* One value for all eight rotations of a repeated unit. */
KV_INLINE uint64_t least_rotation(uint64_t x)
{
    uint64_t least = x;
    for (int i = 1; i < 8; i++) {
        uint64_t turned = x << (8 * i) | x >> (64 - 8 * i);
        if (turned < least)
            least = turned;
    }
    return least;
}

KV_INLINE kv_periodic *periodic_of(kv_index *x, uint64_t unit)
{
    return &x->periodic[unit * UINT64_C(0x9E3779B97F4A7C15) >> 58];
}

/* The periodic run [start, end) around `at` in p[from, to): every byte equals the one 8 bytes before or after it. */
KV_INLINE void periodic_run(const uint8_t *p, uint64_t from, uint64_t to, uint64_t at, uint64_t *start, uint64_t *end)
{
    *end = at + 8 + equal_bytes(p + at, p + at + 8, to - at - 8);
    *start = at - equal_bytes_before(p + at, p + at + 8, at - from);
}

/* The first slot of the bucket for a hash. A full bucket overflows into the next one. */
KV_INLINE uint64_t bucket_of(const kv_index *x, uint64_t h)
{
    return to_range(seed_key(h), x->n_table / BUCKET) * BUCKET;
}

KV_INLINE uint64_t next_bucket(const kv_index *x, uint64_t bucket)
{
    return bucket + BUCKET == x->n_table ? 0 : bucket + BUCKET;
}

/* The bits of a hash that a slot keeps; its other bits hold the number of the seed, counted from 1. */
KV_INLINE uint32_t tag_of(const kv_index *x, uint64_t h)
{
    return (uint32_t)h & ~x->index_mask;
}

/* Bit i of *empty: slot i of the bucket is free. Bit i of *equal: it is used and has this tag. */
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

/* A Bloom filter: each key sets three bits of one word. */
KV_INLINE uint32_t filter_bits(uint32_t key)
{
    return UINT32_C(1) << (key & 31) | UINT32_C(1) << (key >> 5 & 31) | UINT32_C(1) << (key >> 10 & 31);
}

KV_INLINE uint32_t *filter_word(const kv_index *x, uint32_t key)
{
    return x->filter + to_range(key, x->n_filter);
}

/* The position in the parent of the seed that a slot refers to. */
KV_INLINE uint64_t seed_position(const kv_index *x, const uint8_t *parent, uint32_t slot)
{
    const uint64_t at = ((slot & x->index_mask) - UINT64_C(1)) * x->stride;
    return at + minimizer(parent + at);
}

/* KV_AVX2 compiles a function for AVX2; call it only where has_avx2(). */
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

/* The distance between probes: any KV_MIN_RUN bytes of the child hold one whole probe. */
KV_INLINE uint64_t probe_step(const kv_index *x)
{
    return KV_MIN_RUN - x->stride - WINDOW_BYTES + 2;
}

/* winnow.c: the positions of the minimizers of the n windows at p[0, n), ascending; of k-mers with equal order, all. n is at
 * most WINNOW_MAX. Returns their number, at most n + WINDOW. */
unsigned kv_winnow(const uint8_t *p, unsigned n, uint16_t *positions);

#endif
