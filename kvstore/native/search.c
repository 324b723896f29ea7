/* The search by content: where does the parent hold a run of the child, at any alignment?
 *
 * At every stride-th byte of the parent begins a sample: of its SPREAD windows of 16 bytes, the one of the least rank (a
 * 16-bit hash of its first bytes) goes into the table. Any KV_MIN_RUN equal bytes hold, on the child's side, a group of
 * `stride` consecutive places of which exactly one begins a sample; groups lie so that every run of that length has a
 * whole one. So of the child about a quarter is ranked, by loops that compilers turn into vector code, and only windows
 * that are the least of some SPREAD neighbours, one in sixteen, are looked up.
 *
 * Equal windows at many places (padding, repeated tensors) could hide the right place, since only MAX_EQUAL are kept.
 * Stretches that repeat 8 bytes, zeros above all, are therefore kept by length, apart; and where a window is found but
 * the run around it is too short, all places around it are looked at, until a whole group had none of the kind.
 * What may be compared in a gap is limited to a small multiple of its size, so that no data makes this quadratic. */
#include "bytes.h"
#include "kernel.h"

enum { WINDOW = 16, SPREAD = 32, SAMPLE = SPREAD + WINDOW - 1 };
enum { MAX_EQUAL = 8, LONG_RUN = 1 << 16, AHEAD = 32, BATCH = 1024 };

/* A denser index costs more to build, and then less a byte of the child. Its table is filled to 0.8, 0.98 % of the parent;
 * that of the wide one to 0.62, which takes 0.63 %. */
enum { WIDE_STRIDE = 1024, STRIDE = 512, SMALL_STRIDE = 128 };
#define SMALL_PARENT (UINT64_C(8) << 20)
#define MOST_SAMPLES (UINT64_C(1) << 31)

#if KV_SSE2
#define PREFETCH(p) _mm_prefetch((const char *)(p), _MM_HINT_T0)
#else
#define PREFETCH(p) ((void)(p))
#endif

KV_INLINE uint64_t hash_at(const uint8_t *p)
{
    return (load64(p) * UINT64_C(0x9E3779B97F4A7C15) + load64(p + 8)) * UINT64_C(0xD6E8FEB86659FD93);
}

/* `h` spread over 0 .. n - 1; n below 2^32. */
KV_INLINE uint64_t spread(uint64_t h, uint64_t n)
{
    return ((h >> 32) * n) >> 32;
}

KV_INLINE int is_pattern(const uint8_t *p)
{
    return load64(p) == load64(p + 8);
}

/* The rank of the window at each of `n` places. */
KV_INLINE void rank(const uint8_t *KV_RESTRICT p, int16_t *KV_RESTRICT out, unsigned n)
{
    for (unsigned i = 0; i < n; i++) {
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
static uint64_t chosen(const uint8_t *p)
{
    int16_t ranks[SPREAD], least[SPREAD];
    rank(p, ranks, SPREAD);
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

/* out[i]: the least, or greatest, of in[i] and in[i + step]. Out of place, or compilers do not see that it is parallel. */
KV_INLINE void least_of(const int16_t *KV_RESTRICT in, int16_t *KV_RESTRICT out, unsigned step, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        out[i] = in[i] < in[i + step] ? in[i] : in[i + step];
}

KV_INLINE void greatest_of(const int16_t *KV_RESTRICT in, int16_t *KV_RESTRICT out, unsigned step, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        out[i] = in[i] > in[i + step] ? in[i] : in[i + step];
}

/* The places in p[0, n + SPREAD - 1) whose rank is the least of SPREAD neighbours that begin in p[0, n); ascending.
 * n is at most BATCH. Gives their number. */
KV_INLINE unsigned choose_any(const uint8_t *p, unsigned n, uint16_t *places)
{
    enum { ROOM = BATCH + 3 * SPREAD };
    int16_t ranks[ROOM], a[ROOM], b[ROOM];
    const unsigned all = n + SPREAD - 1;
    unsigned count = 0;
    rank(p, ranks, all);
    /* The least of the 32 from each place on, ... */
    least_of(ranks, a, 1, all - 1);
    least_of(a, b, 2, all - 3);
    least_of(b, a, 4, all - 7);
    least_of(a, b, 8, all - 15);
    least_of(b, a + SPREAD - 1, 16, n);
    /* ... then the greatest of the 32 that a place takes part in: its own rank, if it is the least in one. */
    for (unsigned i = 0; i < SPREAD - 1; i++)
        a[i] = a[SPREAD - 1 + n + i] = INT16_MIN;
    greatest_of(a, b, 1, all + 30);
    greatest_of(b, a, 2, all + 28);
    greatest_of(a, b, 4, all + 24);
    greatest_of(b, a, 8, all + 16);
    greatest_of(a, b, 16, all);
    for (unsigned i = 0; i < all; i += 32) {
        uint64_t mask = equal_mask(b + i, ranks + i);
        if (all - i < 32)
            mask &= (UINT64_C(1) << (all - i)) - 1;
        for (; mask; mask &= mask - 1)
            places[count++] = (uint16_t)(i + lowest_bit(mask));
    }
    return count;
}

#if KV_SSE2 && defined(__GNUC__) && defined(__x86_64__)
__attribute__((target("avx2"))) static unsigned choose_avx2(const uint8_t *p, unsigned n, uint16_t *places)
{
    return choose_any(p, n, places);
}

static unsigned choose(int avx2, const uint8_t *p, unsigned n, uint16_t *places)
{
    return avx2 ? choose_avx2(p, n, places) : choose_any(p, n, places);
}

static int has_avx2(void)
{
    return __builtin_cpu_supports("avx2") != 0;
}
#else
static unsigned choose(int avx2, const uint8_t *p, unsigned n, uint16_t *places)
{
    (void)avx2;
    return choose_any(p, n, places);
}

static int has_avx2(void)
{
    return 0;
}
#endif

static uint64_t rotate(uint64_t x, int bytes)
{
    return bytes ? x << (8 * bytes) | x >> (64 - 8 * bytes) : x;
}

/* The same for all eight phases of a repeated pattern. */
static uint64_t any_phase(uint64_t x)
{
    uint64_t least = x;
    for (int i = 1; i < 8; i++)
        if (rotate(x, i) < least)
            least = rotate(x, i);
    return least;
}

static kv_pattern *pattern_of(kv_index *x, uint64_t phase_free)
{
    return &x->patterns[phase_free * UINT64_C(0x9E3779B97F4A7C15) >> 58];
}

uint64_t kv_plan(kv_index *x, uint64_t parent_size, uint64_t literal)
{
    x->stride = parent_size < SMALL_PARENT ? SMALL_STRIDE : literal < parent_size / 16 ? WIDE_STRIDE : STRIDE;
    x->n_samples = parent_size < KV_MIN_RUN ? 0 : (parent_size - SAMPLE) / x->stride + 1;
    x->n_slots = x->n_samples + (x->stride == WIDE_STRIDE ? x->n_samples * 5 / 8 : x->n_samples / 4);
    return x->n_samples < MOST_SAMPLES ? 4 * x->n_slots : 0;
}

/* [start, end): the stretch around `at` of p[from, to) in which every byte equals the one 8 before it, or 8 behind. */
static void stretch(const uint8_t *p, uint64_t from, uint64_t to, uint64_t at, uint64_t *start, uint64_t *end)
{
    *end = at + 8 + equal_bytes(p + at, p + at + 8, to - at - 8);
    *start = at - equal_bytes_before(p + at, p + at + 8, at - from);
}

static void add_pattern(kv_index *x, const uint8_t *parent, uint64_t parent_size, uint64_t at, uint64_t *end)
{
    uint64_t start, pattern = any_phase(load64(parent + at));
    stretch(parent, 0, parent_size, at, &start, end);
    kv_pattern *best = pattern_of(x, pattern);
    if (*end - start > best->size) {
        best->pattern = pattern;
        best->start = start;
        best->size = *end - start;
    }
}

static uint64_t next_slot(const kv_index *x, uint64_t slot)
{
    return slot + 1 == x->n_slots ? 0 : slot + 1;
}

/* The place of the window that a slot stands for. */
static uint64_t place_of(const kv_index *x, const uint8_t *parent, uint32_t held)
{
    uint64_t at = ((held & x->index_mask) - UINT64_C(1)) * x->stride;
    return at + chosen(parent + at);
}

static void add_sample(kv_index *x, const uint8_t *parent, uint64_t sample, uint64_t place, uint64_t h)
{
    uint64_t slot = spread(h, x->n_slots);
    uint32_t tag = (uint32_t)h & ~x->index_mask;
    int equal = 0;
    for (; x->slots[slot]; slot = next_slot(x, slot)) {
        uint32_t held = x->slots[slot];
        if ((held & ~x->index_mask) == tag &&
            memcmp(parent + place_of(x, parent, held), parent + place, WINDOW) == 0 && ++equal == MAX_EQUAL)
            return;
    }
    x->slots[slot] = tag | (uint32_t)(sample + 1);
}

/* Every access here misses the cache, so each is asked for some samples ahead: first the bytes, then the slot. */
static void build(kv_index *x, const uint8_t *parent, uint64_t parent_size)
{
    uint64_t seen = 0; /* end of the last stretch of a pattern */
    uint64_t places[AHEAD], hashes[AHEAD];
    memset(x->slots, 0, (size_t)(4 * x->n_slots));
    for (x->index_mask = 1; x->index_mask < x->n_samples; x->index_mask = x->index_mask << 1 | 1)
        ;
    for (uint64_t i = 0; i < x->n_samples + AHEAD; i++) {
        if (i >= AHEAD) {
            uint64_t place = places[i % AHEAD];
            if (!is_pattern(parent + place))
                add_sample(x, parent, i - AHEAD, place, hashes[i % AHEAD]);
            else if (place + WINDOW > seen)
                add_pattern(x, parent, parent_size, place, &seen);
        }
        if (i < x->n_samples) {
            uint64_t at = i * x->stride;
            if (i + AHEAD < x->n_samples) {
                PREFETCH(parent + at + AHEAD * x->stride);
                PREFETCH(parent + at + AHEAD * x->stride + SAMPLE);
            }
            places[i % AHEAD] = at + chosen(parent + at);
            hashes[i % AHEAD] = hash_at(parent + places[i % AHEAD]);
            PREFETCH(&x->slots[spread(hashes[i % AHEAD], x->n_slots)]);
        }
    }
    x->built = 1;
}

/* Widens the equal pair (c, p) both ways, inside child[from, to) and the parent; keeps it if longer than the hit. Too
 * short runs are remembered for a while: in repeating data the same ones come up at every window. */
static void widen(kv_encoder *e, uint64_t from, uint64_t to, uint64_t c, uint64_t p)
{
    kv_index *x = e->index;
    for (int i = 0; i < KV_RECENT; i++)
        if (x->recent[i].offset == p - c && c - x->recent[i].start < x->recent[i].size)
            return;
    uint64_t before = c - from < p ? c - from : p;
    uint64_t after = to - c < e->parent_size - p ? to - c : e->parent_size - p;
    before = equal_bytes_before(e->child + c, e->parent + p, before);
    uint64_t n = before + equal_bytes(e->child + c, e->parent + p, after);
    e->budget -= n + 64 < e->budget ? n + 64 : e->budget;
    if (n < KV_MIN_RUN) {
        kv_short_run run = {p - c, c - before, n};
        x->recent[x->n_recent++ % KV_RECENT] = run;
    } else if (n > e->hit_n) {
        e->hit_child = c - before;
        e->hit_parent = p - before;
        e->hit_n = n;
    }
}

/* A window of the child that repeats 8 bytes: the end of its stretch, or 0 if the parent has no such sample. */
static uint64_t look_up_pattern(kv_encoder *e, uint64_t from, uint64_t to, uint64_t at)
{
    uint64_t start, end, pattern = any_phase(load64(e->child + at));
    const kv_pattern *best = pattern_of(e->index, pattern);
    if (best->size == 0)
        return 0;
    stretch(e->child, from, to, at, &start, &end);
    if (best->pattern == pattern) {
        uint64_t first = load64(e->child + start);
        for (uint64_t k = 0; k < 8; k++)
            if (load64(e->parent + best->start + k) == first) {
                widen(e, from, to, start, best->start + k);
                break;
            }
    }
    return end;
}

/* The number of samples equal to the window at `at`; the longest run around one of them is in e->hit_*. */
static int look_up(kv_encoder *e, uint64_t from, uint64_t to, uint64_t at)
{
    const kv_index *x = e->index;
    const uint64_t h = hash_at(e->child + at);
    uint32_t tag = (uint32_t)h & ~x->index_mask;
    uint64_t slot = spread(h, x->n_slots);
    int equal = 0;
    for (; x->slots[slot] && e->budget; slot = next_slot(x, slot)) {
        uint32_t held = x->slots[slot];
        if ((held & ~x->index_mask) != tag)
            continue;
        uint64_t p = place_of(x, e->parent, held);
        if (memcmp(e->parent + p, e->child + at, WINDOW) != 0)
            continue;
        equal++;
        widen(e, from, to, at, p);
        if (e->hit_n >= LONG_RUN || e->hit_child + e->hit_n == to)
            break;
    }
    return equal;
}

int kv_search(kv_encoder *e, uint64_t from, uint64_t to)
{
    kv_index *x = e->index;
    if (x->n_samples == 0 || to - from < KV_MIN_RUN)
        return 0;
    if (!x->built)
        build(x, e->parent, e->parent_size);
    memset(x->recent, 0, sizeof x->recent);

    const int avx2 = has_avx2();
    const uint64_t stride = x->stride, step = KV_MIN_RUN - stride - SAMPLE + 2;
    const uint64_t last = to - SAMPLE + 1; /* places of samples lie before it */
    uint64_t unseen = from;                /* no place from here to the group was looked at */
    uint64_t group = from + step - 1;
    while (group < last) {
        uint64_t stop = last - group < stride ? last : group + stride;
        uint64_t i = group;
        for (uint64_t next = group + step; next < last && next < group + step + stride + SAMPLE; next += 64)
            PREFETCH(e->child + next); /* groups lie pages apart */
        while (i < stop) {
            uint16_t places[BATCH + SPREAD];
            const uint64_t base = i, n = stop - i < BATCH ? stop - i : BATCH;
            const unsigned count = choose(avx2, e->child + base, (unsigned)n, places);
            uint64_t stretch_end = 0;
            i += n;
            for (unsigned k = 0; k < count; k++) {
                uint64_t at = base + places[k];
                if (k + 8 < count)
                    PREFETCH(&x->slots[spread(hash_at(e->child + base + places[k + 8]), x->n_slots)]);
                if (at + WINDOW <= stretch_end)
                    continue;
                if (is_pattern(e->child + at)) {
                    if ((stretch_end = look_up_pattern(e, from, to, at)) == 0)
                        continue;
                } else if (look_up(e, from, to, at) == 0) {
                    continue;
                }
                if (e->hit_n)
                    return 1;
                if (e->budget == 0)
                    return 0;
                /* Too short here: look at all that is near. */
                uint64_t end = stretch_end > at ? stretch_end : at + 1;
                if (end > i + SAMPLE) /* nothing else can begin in a stretch */
                    i = end - SAMPLE;
                end = end > last || last - end < stride ? last : end + stride;
                if (end > stop)
                    stop = end;
                if (unseen < group) {
                    i = unseen;
                    unseen = group;
                    break;
                }
            }
        }
        unseen = stop;
        group = stop - stride + step > group + step ? stop - stride + step : group + step;
    }
    return 0;
}
