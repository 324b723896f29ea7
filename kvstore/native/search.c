/* The search by content: where does the parent hold a run of the child, at any alignment?
 *
 * A window of 16 bytes is taken at every stride-th byte of the parent. Any KV_MIN_RUN equal bytes hold, on the child's
 * side, a group of `stride` consecutive windows of which exactly one is such a sample; groups lie so that every run of
 * that length contains a whole one. So the child is looked at in groups only, about a fifth of its windows, and a
 * filter of one cache line a look-up answers nearly all of them.
 *
 * Equal windows at many places (padding, repeated tensors) could hide the right place, since only MAX_EQUAL are kept.
 * Stretches that repeat 8 bytes, zeros above all, are therefore kept by length, apart; and where a window is found but
 * the run around it is too short, all windows around it are looked at, until a whole group had none of the kind.
 * What may be compared in a gap is limited to a small multiple of its size, so that no data makes this quadratic. */
#include "bytes.h"
#include "kernel.h"

enum { WINDOW = 16, MAX_EQUAL = 8, LONG_RUN = 1 << 16, AHEAD = 8 };

/* Slots are 4 bytes at a load of 0.8, the filter has 12 bits a sample: 6.5 bytes a sample, 0.93 % of the parent. */
enum { STRIDE = 704, SMALL_STRIDE = 128 };
#define SMALL_PARENT (UINT64_C(8) << 20)
#define MOST_SAMPLES (UINT64_C(1) << 31)

#if KV_SSE2
#define PREFETCH(p) _mm_prefetch((const char *)(p), _MM_HINT_T0)
#else
#define PREFETCH(p) ((void)(p))
#endif

KV_INLINE uint64_t hash_words(uint64_t x, uint64_t y)
{
    return (x * UINT64_C(0x9E3779B97F4A7C15) + y) * UINT64_C(0xD6E8FEB86659FD93);
}

KV_INLINE uint64_t hash_at(const uint8_t *p)
{
    return hash_words(load64(p), load64(p + 8));
}

/* `h` spread over 0 .. n - 1; n below 2^32. */
KV_INLINE uint64_t spread(uint64_t h, uint64_t n)
{
    return ((h >> 32) * n) >> 32;
}

KV_INLINE uint64_t filter_bits(uint64_t h)
{
    return UINT64_C(1) << (h >> 26 & 63) | UINT64_C(1) << (h >> 20 & 63);
}

KV_INLINE int may_hold(const kv_index *x, uint64_t h)
{
    uint64_t bits = filter_bits(h);
    return (x->filter[spread(h, x->n_words)] & bits) == bits;
}

static void add_to_filter(kv_index *x, uint64_t h)
{
    x->filter[spread(h, x->n_words)] |= filter_bits(h);
}

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

static void plan(kv_index *x, uint64_t parent_size)
{
    x->stride = parent_size < SMALL_PARENT ? SMALL_STRIDE : STRIDE;
    x->n_samples = parent_size < KV_MIN_RUN ? 0 : (parent_size - WINDOW) / x->stride + 1;
    x->n_slots = x->n_samples + x->n_samples / 4 + 1;
    x->n_words = x->n_samples * 12 / 64 + 1;
}

uint64_t kv_index_size(uint64_t parent_size)
{
    kv_index x;
    plan(&x, parent_size);
    return x.n_samples == 0 || x.n_samples >= MOST_SAMPLES ? 0 : 8 * x.n_words + 4 * x.n_slots;
}

/* [start, end): the stretch around `at` of p[from, to) in which every byte equals the one 8 before it, or 8 behind. */
static void stretch(const uint8_t *p, uint64_t from, uint64_t to, uint64_t at, uint64_t *start, uint64_t *end)
{
    *end = at + 8 + equal_bytes(p + at, p + at + 8, to - at - 8);
    *start = at - equal_bytes_before(p + at, p + at + 8, at - from);
}

static void add_sample(kv_index *x, const uint8_t *parent, uint64_t sample, uint64_t h)
{
    uint64_t slot = spread(h, x->n_slots);
    const uint8_t *window = parent + sample * x->stride;
    uint32_t tag = (uint32_t)h & ~x->index_mask;
    int equal = 0;
    for (; x->slots[slot]; slot = slot + 1 == x->n_slots ? 0 : slot + 1) {
        uint32_t held = x->slots[slot];
        if ((held & ~x->index_mask) == tag &&
            memcmp(parent + ((held & x->index_mask) - UINT64_C(1)) * x->stride, window, WINDOW) == 0 &&
            ++equal == MAX_EQUAL)
            return;
    }
    x->slots[slot] = tag | (uint32_t)(sample + 1);
}

static void build(kv_index *x, const uint8_t *parent, uint64_t parent_size)
{
    uint64_t seen = 0; /* end of the last stretch of a pattern */
    plan(x, parent_size);
    x->filter = (uint64_t *)x->scratch;
    x->slots = (uint32_t *)(x->filter + x->n_words);
    memset(x->scratch, 0, (size_t)(8 * x->n_words + 4 * x->n_slots));
    for (x->index_mask = 1; x->index_mask < x->n_samples; x->index_mask = x->index_mask << 1 | 1)
        ;
    for (uint64_t i = 0; i < x->n_samples; i++) {
        uint64_t at = i * x->stride;
        const uint8_t *window = parent + at;
        if (i + AHEAD < x->n_samples)
            PREFETCH(window + AHEAD * x->stride);
        uint64_t word = load64(window);
        if (word != load64(window + 8)) {
            uint64_t h = hash_at(window);
            add_to_filter(x, h);
            add_sample(x, parent, i, h);
        } else if (at + WINDOW > seen) {
            uint64_t start, pattern = any_phase(word);
            stretch(parent, 0, parent_size, at, &start, &seen);
            kv_pattern *best = pattern_of(x, pattern);
            if (seen - start > best->size) {
                best->pattern = pattern;
                best->start = start;
                best->size = seen - start;
            }
            for (int k = 0; k < 8; k++)
                add_to_filter(x, hash_words(rotate(word, k), rotate(word, k)));
        }
    }
    x->built = 1;
}

/* Widens the equal pair (c, p) both ways, inside child[from, to) and the parent; keeps it if longer than the hit. */
static void widen(kv_encoder *e, uint64_t from, uint64_t to, uint64_t c, uint64_t p)
{
    uint64_t before = c - from < p ? c - from : p;
    uint64_t after = to - c < e->parent_size - p ? to - c : e->parent_size - p;
    before = equal_bytes_before(e->child + c, e->parent + p, before);
    uint64_t n = before + equal_bytes(e->child + c, e->parent + p, after);
    e->budget -= n + 64 < e->budget ? n + 64 : e->budget;
    if (n > e->hit_n) {
        e->hit_child = c - before;
        e->hit_parent = p - before;
        e->hit_n = n;
    }
}

/* A window of the child that repeats 8 bytes. Gives the end of its stretch. */
static uint64_t look_up_pattern(kv_encoder *e, uint64_t from, uint64_t to, uint64_t at)
{
    uint64_t start, end, word = load64(e->child + at);
    stretch(e->child, from, to, at, &start, &end);
    const kv_pattern *best = pattern_of(e->index, any_phase(word));
    if (best->size >= WINDOW && best->pattern == any_phase(word)) {
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
static int look_up(kv_encoder *e, uint64_t from, uint64_t to, uint64_t at, uint64_t h)
{
    const kv_index *x = e->index;
    uint32_t tag = (uint32_t)h & ~x->index_mask;
    uint64_t slot = spread(h, x->n_slots);
    int equal = 0;
    for (; x->slots[slot] && e->budget; slot = slot + 1 == x->n_slots ? 0 : slot + 1) {
        uint32_t held = x->slots[slot];
        uint64_t p = ((held & x->index_mask) - UINT64_C(1)) * x->stride;
        if ((held & ~x->index_mask) != tag || memcmp(e->parent + p, e->child + at, WINDOW) != 0)
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
    if (e->parent_size < KV_MIN_RUN || to - from < KV_MIN_RUN)
        return 0;
    if (!x->built)
        build(x, e->parent, e->parent_size);

    const uint64_t stride = x->stride, step = KV_MIN_RUN - stride - WINDOW + 2;
    const uint64_t last = to - WINDOW + 1;       /* windows start before it */
    uint64_t unseen = from;                      /* no window from here to the group was looked at */
    uint64_t group = from + step - 1;
    while (group < last) {
        uint64_t stop = last - group < stride ? last : group + stride;
        uint64_t i = group;
        while (i < stop) {
            uint64_t h = hash_at(e->child + i);
            if (!may_hold(x, h)) {
                i++;
                continue;
            }
            if (e->budget == 0)
                return 0;
            uint64_t next = i + 1;
            int found;
            e->hit_n = 0;
            if (load64(e->child + i) == load64(e->child + i + 8)) {
                next = look_up_pattern(e, from, to, i) - WINDOW + 1;
                found = 1;
            } else {
                found = look_up(e, from, to, i, h);
            }
            if (e->hit_n >= KV_MIN_RUN)
                return 1;
            e->hit_n = 0;
            if (found) { /* too short here: look at all that is near */
                uint64_t end = last - next < stride ? last : next + stride;
                if (end > stop)
                    stop = end;
                if (unseen < group) {
                    next = unseen;
                    unseen = group;
                }
            }
            i = next;
        }
        unseen = stop;
        group = stop - stride + step > group + step ? stop - stride + step : group + step;
    }
    return 0;
}
