/* The prefilter: which literal gaps are worth a search?
 *
 * kv_search finds something in a literal gap only if a minimizer of one of its probes equals a seed, so exactly those are
 * tested first. Three passes stay in the CPU cache: the minimizers go through a filter of the seeds; the few that pass are
 * candidates and go into a small table; the seed list is streamed past that table. Where no candidate is confirmed, the
 * large table of seeds is never made. */
#include "minimizers.h"

enum { TABLE = 2 * KV_CANDIDATES, BITS = 32 * KV_CANDIDATES };

/* Each round streams the seed list once; after MAX_ROUNDS rounds the search itself is cheaper. */
enum { MAX_ROUNDS = 16 };

/* Marks the literal gap of every candidate that equals a seed. A slot of the table holds the number of a candidate, from 1. */
static void confirm(const kv_encoder *e, kv_prefilter *s)
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
    for (uint64_t k = 0; k < x->n_seeds; k++) {
        const uint32_t key = x->slots[k];
        if (!(s->bits[key % BITS / 64] >> key % 64 & 1))
            continue;
        for (unsigned slot = key % TABLE; s->table[slot]; slot = (slot + 1) % TABLE) {
            const unsigned i = s->table[slot] - 1u;
            const uint8_t *p = e->parent + k * x->stride;
            if (s->keys[i] == key && !*s->found[i] && memcmp(p + minimizer(p), e->child + s->positions[i], KMER) == 0)
                *s->found[i] = 1;
        }
    }
    s->n = 0;
    s->rounds++;
}

void kv_prefilter_gap(const kv_encoder *e, uint64_t from, uint64_t to, uint8_t *found)
{
    const kv_index *x = e->index;
    kv_prefilter *s = &e->index->prefilter;
    const uint64_t step = probe_step(x), last = to - WINDOW_BYTES + 1;
    *found = 0;
    for (uint64_t probe = from + step - 1; probe < last && !*found && s->rounds < MAX_ROUNDS; probe += step) {
        const uint64_t stop = last - probe < x->stride ? last : probe + x->stride;
        for (uint64_t next = probe + step; next < last && next < probe + step + x->stride + WINDOW_BYTES; next += 64)
            PREFETCH(e->child + next); /* probes lie in different pages */
        for (uint64_t i = probe; i < stop; i += WINNOW_MAX) {
            uint16_t positions[WINNOW_MAX + WINDOW];
            const unsigned n = kv_winnow(e->child + i, stop - i < WINNOW_MAX ? (unsigned)(stop - i) : WINNOW_MAX, positions);
            for (unsigned k = 0; k < n; k++) {
                const uint64_t at = i + positions[k];
                const uint32_t key = seed_key(hash_at(e->child + at)), bits = filter_bits(key);
                if (x->has_periodic && is_periodic(e->child + at))
                    *found = 1;
                if ((*filter_word(x, key) & bits) != bits)
                    continue;
                if (s->n == KV_CANDIDATES)
                    confirm(e, s);
                s->keys[s->n] = key;
                s->positions[s->n] = at;
                s->found[s->n++] = found;
            }
        }
    }
    if (s->rounds >= MAX_ROUNDS)
        *found = 1;
}

void kv_prefilter_end(const kv_encoder *e)
{
    if (e->index->prefilter.n)
        confirm(e, &e->index->prefilter);
}

void kv_filter_reset(kv_index *x)
{
    /* The room behind the seed list: half for a table, half for the filter. */
    const uint64_t first = (x->n_seeds + BUCKET - 1) / BUCKET * BUCKET, room = x->n_slots - first;
    x->n_table = (room / 2) / BUCKET * BUCKET;
    x->n_filter = room - x->n_table;
    x->table = x->slots + first;
    x->filter = x->table + x->n_table;
    memset(x->filter, 0, (size_t)(4 * x->n_filter));
}

void kv_filter_add_gap(const kv_encoder *e, uint64_t from, uint64_t to)
{
    const uint64_t last = to - WINDOW_BYTES + 1;
    for (uint64_t i = from; i < last; i += WINNOW_MAX) {
        uint16_t positions[WINNOW_MAX + WINDOW];
        const unsigned n = kv_winnow(e->child + i, last - i < WINNOW_MAX ? (unsigned)(last - i) : WINNOW_MAX, positions);
        for (unsigned k = 0; k < n; k++) {
            const uint32_t key = seed_key(hash_at(e->child + i + positions[k]));
            *filter_word(e->index, key) |= filter_bits(key);
        }
    }
}
