/* Before the search: the windows of a child that matter, and whether the parent has any of them.
 *
 * What the search looks at first in a gap are whole groups of `stride` places. If no window there equals a sample, it finds
 * nothing. The samples that may be equal are found by streaming: the child's windows go through a filter of the samples,
 * the few that pass into a small table, and the list of all samples past it. So nothing misses the cache, and where there is
 * nothing to find the large table is never made. */
#include "windows.h"

/* All is done in whole vectors of at most LANES places: what is left over would be done one by one, slowly. */
enum { LANES = 32 };

/* out[i]: the least, or greatest, of in[i], in[i + step], in[i + 2 step] and in[i + 3 step]. Out of place and through
 * pointers of their own, or compilers do not see that it is parallel. */
#define OF_FOUR(name, than)                                                                                              \
    KV_INLINE void name(const int16_t *KV_RESTRICT in, int16_t *KV_RESTRICT out, size_t step, size_t n)                  \
    {                                                                                                                    \
        const int16_t *b = in + step, *c = b + step, *d = c + step;                                                      \
        for (size_t i = 0; i < n; i++) {                                                                                 \
            const int16_t x = in[i] than b[i] ? in[i] : b[i], y = c[i] than d[i] ? c[i] : d[i];                          \
            out[i] = x than y ? x : y;                                                                                   \
        }                                                                                                                \
    }
OF_FOUR(least_of, <)
OF_FOUR(greatest_of, >)

static void fill(int16_t *p, unsigned n, int16_t value)
{
    for (unsigned i = 0; i < n; i++)
        p[i] = value;
}

KV_INLINE unsigned choose_any(const uint8_t *p, unsigned n, uint16_t *places)
{
    enum { ROOM = CHOICE + 5 * SPREAD };
    int16_t ranks[ROOM], a[ROOM], b[ROOM];
    const unsigned all = n + SPREAD - 1, whole = all / LANES * LANES, rounded = whole + LANES;
    unsigned count = 0;
    for (unsigned i = 0; i < whole; i += LANES)
        rank(p + i, ranks + i);
    uint8_t rest[LANES + 3] = {0};
    memcpy(rest, p + whole, all - whole + 3);
    rank(rest, ranks + whole);
    /* The least of the 32 from each place on, ... */
    fill(ranks + all, 48 + LANES, INT16_MAX);
    fill(a + rounded, 48, INT16_MAX);
    fill(b + rounded, 16, INT16_MAX);
    least_of(ranks, a, 1, rounded);
    least_of(a, b, 4, rounded);
    for (size_t i = 0; i < rounded; i++)
        a[SPREAD + i] = b[i] < b[i + 16] ? b[i] : b[i + 16];
    /* ... then the greatest of the 32 that a place takes part in: its own rank, if it is the least in one. */
    fill(a, SPREAD, INT16_MIN);
    fill(a + SPREAD + n, 2 * LANES, INT16_MIN);
    fill(b + rounded, 48, INT16_MIN);
    greatest_of(a + 1, b, 1, rounded);
    greatest_of(b, a, 4, rounded);
    fill(a + rounded, 16, INT16_MIN);
    for (size_t i = 0; i < rounded; i++)
        b[i] = a[i] > a[i + 16] ? a[i] : a[i + 16];
    for (unsigned i = 0; i < all; i += LANES) {
        uint64_t mask = equal_mask(b + i, ranks + i);
        if (all - i < LANES)
            mask &= (UINT64_C(1) << (all - i)) - 1;
        /* Mostly two; four without a branch that nobody could foresee. */
        for (int k = 0; k < 4; k++) {
            places[count] = (uint16_t)(i + lowest_bit(mask | UINT64_C(1) << LANES));
            count += mask != 0;
            mask &= mask - (mask != 0);
        }
        for (; mask; mask &= mask - 1)
            places[count++] = (uint16_t)(i + lowest_bit(mask));
    }
    return count;
}

KV_AVX2 static unsigned choose_avx2(const uint8_t *p, unsigned n, uint16_t *places)
{
    return choose_any(p, n, places);
}

static unsigned choose_plain(const uint8_t *p, unsigned n, uint16_t *places)
{
    return choose_any(p, n, places);
}

unsigned kv_choose(const uint8_t *p, unsigned n, uint16_t *places)
{
    return has_avx2() ? choose_avx2(p, n, places) : choose_plain(p, n, places);
}

enum { TABLE = 2 * KV_SCREEN, BITS = 32 * KV_SCREEN };

/* Each round takes the list once; after so many the search itself is cheaper. */
enum { MOST_ROUNDS = 16 };

/* Marks the gaps of those windows that are in the parent. A slot of the table holds the number of a window, from 1. */
static void confirm(const kv_encoder *e, kv_screen *s)
{
    const kv_index *x = e->index;
    memset(s->table, 0, sizeof s->table);
    memset(s->bits, 0, sizeof s->bits);
    for (unsigned i = 0; i < s->n; i++) {
        unsigned slot = s->keys[i] % TABLE;
        while (s->table[slot])
            slot = (slot + 1) % TABLE;
        s->table[slot] = (uint16_t)(i + 1);
        s->bits[s->keys[i] % BITS / 64] |= UINT64_C(1) << s->keys[i] % 64;
    }
    for (uint64_t k = 0; k < x->n_samples; k++) {
        const uint32_t key = x->slots[k];
        if (!(s->bits[key % BITS / 64] >> key % 64 & 1))
            continue;
        for (unsigned slot = key % TABLE; s->table[slot]; slot = (slot + 1) % TABLE) {
            const unsigned i = s->table[slot] - 1u;
            const uint8_t *p = e->parent + k * x->stride;
            if (s->keys[i] == key && !*s->found[i] && memcmp(p + chosen(p), e->child + s->places[i], WINDOW) == 0)
                *s->found[i] = 1;
        }
    }
    s->n = 0;
    s->rounds++;
}

void kv_screen_gap(const kv_encoder *e, uint64_t from, uint64_t to, uint8_t *found)
{
    const kv_index *x = e->index;
    kv_screen *s = &e->index->screen;
    const uint64_t step = group_step(x), last = to - SAMPLE + 1;
    *found = 0;
    for (uint64_t group = from + step - 1; group < last && !*found && s->rounds < MOST_ROUNDS; group += step) {
        const uint64_t stop = last - group < x->stride ? last : group + x->stride;
        for (uint64_t next = group + step; next < last && next < group + step + x->stride + SAMPLE; next += 64)
            PREFETCH(e->child + next); /* groups lie pages apart */
        for (uint64_t i = group; i < stop; i += CHOICE) {
            uint16_t places[CHOICE + SPREAD];
            const unsigned n = kv_choose(e->child + i, stop - i < CHOICE ? (unsigned)(stop - i) : CHOICE, places);
            for (unsigned k = 0; k < n; k++) {
                const uint64_t at = i + places[k];
                const uint32_t key = list_key(hash_at(e->child + at)), bits = filter_bits(key);
                if (x->has_pattern && is_pattern(e->child + at))
                    *found = 1;
                if ((*filter_word(x, key) & bits) != bits)
                    continue;
                if (s->n == KV_SCREEN)
                    confirm(e, s);
                s->keys[s->n] = key;
                s->places[s->n] = at;
                s->found[s->n++] = found;
            }
        }
    }
    if (s->rounds >= MOST_ROUNDS)
        *found = 1;
}

void kv_screen_end(const kv_encoder *e)
{
    if (e->index->screen.n)
        confirm(e, &e->index->screen);
}

void kv_filter_gaps(kv_index *x)
{
    /* Half of the room behind the list for the filter, the other for a table. */
    const uint64_t first = (x->n_samples + BUCKET - 1) / BUCKET * BUCKET, room = x->n_slots - first;
    x->n_table = (room / 2) / BUCKET * BUCKET;
    x->n_filter = room - x->n_table;
    x->table = x->slots + first;
    x->filter = x->table + x->n_table;
    memset(x->filter, 0, (size_t)(4 * x->n_filter));
}

void kv_filter_gap(const kv_encoder *e, uint64_t from, uint64_t to)
{
    const uint64_t last = to - SAMPLE + 1;
    for (uint64_t i = from; i < last; i += CHOICE) {
        uint16_t places[CHOICE + SPREAD];
        const unsigned n = kv_choose(e->child + i, last - i < CHOICE ? (unsigned)(last - i) : CHOICE, places);
        for (unsigned k = 0; k < n; k++) {
            const uint32_t key = list_key(hash_at(e->child + i + places[k]));
            *filter_word(e->index, key) |= filter_bits(key);
        }
    }
}
