/* The search by content: seed and extend. Where does the parent hold a run of the child, at any alignment?
 *
 * The terms are defined in minimizers.h. The table holds the seeds: the minimizers of the parent's windows at every
 * stride-th byte. The child is probed: in any KV_MIN_RUN bytes that both sides have lies a whole probe, `stride` consecutive
 * windows, exactly one of which begins where a seed's window begins in the parent. That window has the same minimizer. So
 * only about a quarter of the child is hashed, by loops that compilers vectorize, and only minimizers, one k-mer in sixteen,
 * are looked up. An equal seed is extended both ways by comparing bytes.
 *
 * The table keeps at most MAX_EQUAL equal seeds, so k-mers that occur often (padding, repeated tensors) could hide the right
 * position. Two measures help. Runs that repeat 8 bytes, mostly zeros, are kept apart, the longest of each kind. And where a
 * seed is found but its run is too short, all windows around it are looked up, until a whole probe finds no seed.
 * Each literal gap has a budget of compared bytes, a small multiple of its size, so no input makes the search quadratic. */
#include "minimizers.h"

enum { LONG_RUN = 1 << 16 };

/* Extends the equal pair (c, p) both ways, inside child[from, to) and the parent; keeps the run if it is longer than the
 * hit. Remembers the latest runs that were too short: in repetitive data every k-mer leads to the same ones. */
static void extend(kv_encoder *e, uint64_t from, uint64_t to, uint64_t c, uint64_t p)
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

/* Looks up a k-mer of the child that repeats 8 bytes. Returns the end of its periodic run, or 0 if the parent's seeds have
 * none of this kind. */
static uint64_t look_up_periodic(kv_encoder *e, uint64_t from, uint64_t to, uint64_t at)
{
    uint64_t start, end, unit = least_rotation(load64(e->child + at));
    const kv_periodic *best = periodic_of(e->index, unit);
    if (best->size == 0)
        return 0;
    periodic_run(e->child, from, to, at, &start, &end);
    if (best->unit == unit) {
        uint64_t first = load64(e->child + start);
        for (uint64_t k = 0; k < 8; k++)
            if (load64(e->parent + best->start + k) == first) {
                extend(e, from, to, start, best->start + k);
                break;
            }
    }
    return end;
}

/* The number of seeds that equal the k-mer at `at`; the longest run around one of them is in e->hit_*. */
static int look_up_seeds(kv_encoder *e, uint64_t from, uint64_t to, uint64_t at)
{
    const kv_index *x = e->index;
    const uint64_t h = hash_at(e->child + at);
    const uint32_t tag = tag_of(x, h);
    uint32_t equal, empty = 0;
    int found = 0;
    for (uint64_t bucket = bucket_of(x, h); !empty && e->budget; bucket = next_bucket(x, bucket))
        for (match(x, bucket, tag, &equal, &empty); equal && e->budget; equal &= equal - 1) {
            uint64_t p = seed_position(x, e->parent, x->table[bucket + lowest_bit(equal)]);
            if (memcmp(e->parent + p, e->child + at, KMER) != 0)
                continue;
            found++;
            extend(e, from, to, at, p);
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

    const uint64_t stride = x->stride, step = probe_step(x);
    const uint64_t last = to - WINDOW_BYTES + 1; /* every window begins before it */
    uint64_t unseen = from;                      /* windows between here and the probe were skipped */
    uint64_t probe = from + step - 1;
    while (probe < last) {
        uint64_t stop = last - probe < stride ? last : probe + stride;
        uint64_t i = probe;
        for (uint64_t next = probe + step; next < last && next < probe + step + stride + WINDOW_BYTES; next += 64)
            PREFETCH(e->child + next); /* probes lie in different pages */
        while (i < stop) {
            uint16_t positions[WINNOW_MAX + WINDOW];
            const uint64_t base = i, n = stop - i < WINNOW_MAX ? stop - i : WINNOW_MAX;
            const unsigned count = kv_winnow(e->child + base, (unsigned)n, positions);
            uint64_t periodic_end = 0;
            i += n;
            for (unsigned k = 0; k < count; k++) {
                uint64_t at = base + positions[k];
                if (k + 8 < count)
                    PREFETCH(x->table + bucket_of(x, hash_at(e->child + base + positions[k + 8])));
                if (at + KMER <= periodic_end)
                    continue;
                if (is_periodic(e->child + at)) {
                    if ((periodic_end = look_up_periodic(e, from, to, at)) == 0)
                        continue;
                } else if (look_up_seeds(e, from, to, at) == 0) {
                    continue;
                }
                if (e->hit_n)
                    return 1;
                if (e->budget == 0)
                    return 0;
                /* The run is too short: look up all windows around it. */
                uint64_t end = periodic_end > at ? periodic_end : at + 1;
                if (end > i + WINDOW_BYTES) /* inside a periodic run nothing else can begin */
                    i = end - WINDOW_BYTES;
                end = end > last || last - end < stride ? last : end + stride;
                if (end > stop)
                    stop = end;
                if (unseen < probe) {
                    i = unseen;
                    unseen = probe;
                    break;
                }
            }
        }
        unseen = stop;
        probe = stop - stride + step > probe + step ? stop - stride + step : probe + step;
    }
    return 0;
}
