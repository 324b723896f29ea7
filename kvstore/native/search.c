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
#include "windows.h"

enum { LONG_RUN = 1 << 16 };

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
    const uint32_t tag = tag_of(x, h);
    uint32_t equal, empty = 0;
    int found = 0;
    for (uint64_t bucket = bucket_of(x, h); !empty && e->budget; bucket = next_bucket(x, bucket))
        for (match(x, bucket, tag, &equal, &empty); equal && e->budget; equal &= equal - 1) {
            uint64_t p = place_of(x, e->parent, x->table[bucket + lowest_bit(equal)]);
            if (memcmp(e->parent + p, e->child + at, WINDOW) != 0)
                continue;
            found++;
            widen(e, from, to, at, p);
            if (e->hit_n >= LONG_RUN || e->hit_child + e->hit_n == to)
                return found;
        }
    return found;
}

int kv_search(kv_encoder *e, uint64_t from, uint64_t to)
{
    kv_index *x = e->index;
    if (to - from < KV_MIN_RUN)
        return 0;
    memset(x->recent, 0, sizeof x->recent);

    const uint64_t stride = x->stride, step = group_step(x);
    const uint64_t last = to - SAMPLE + 1; /* places of samples lie before it */
    uint64_t unseen = from;                /* no place from here to the group was looked at */
    uint64_t group = from + step - 1;
    while (group < last) {
        uint64_t stop = last - group < stride ? last : group + stride;
        uint64_t i = group;
        for (uint64_t next = group + step; next < last && next < group + step + stride + SAMPLE; next += 64)
            PREFETCH(e->child + next); /* groups lie pages apart */
        while (i < stop) {
            uint16_t places[CHOICE + SPREAD];
            const uint64_t base = i, n = stop - i < CHOICE ? stop - i : CHOICE;
            const unsigned count = kv_choose(e->child + base, (unsigned)n, places);
            uint64_t stretch_end = 0;
            i += n;
            for (unsigned k = 0; k < count; k++) {
                uint64_t at = base + places[k];
                if (k + 8 < count)
                    PREFETCH(x->table + bucket_of(x, hash_at(e->child + base + places[k + 8])));
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
