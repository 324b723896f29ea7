/* The index of a parent, for the search by content: at every stride-th byte begins a sample, of which one window counts.
 * First its samples are listed, as the walk of the encoder comes past: there the bytes are in the cache. A table of them, of
 * which every access would miss the cache, is made only where the list shows that there is something to find. */
#include "windows.h"

/* A denser index costs more to build, and then less a byte of the child. Its table is filled to 0.8, 0.98 % of the parent;
 * that of the wide one to 0.62, which takes 0.63 %. */
enum { WIDE_STRIDE = 1024, STRIDE = 512, SMALL_STRIDE = 128 };
#define SMALL_PARENT (UINT64_C(8) << 20)
#define MOST_SAMPLES (UINT64_C(1) << 31)

/* Samples taken together, in the list and in the table: then the next ones are asked for. */
enum { BATCH = 32 };

/* Further than this behind the walk, the bytes of samples are not in the cache. */
#define FAR_BEHIND (UINT64_C(1) << 17)

/* Bytes of the parent up to the end of the next whole batch. */
KV_INLINE uint64_t batch_end(const kv_index *x)
{
    return x->n_samples - x->listed < BATCH ? UINT64_MAX : (x->listed + BATCH - 1) * x->stride + SAMPLE;
}

uint64_t kv_plan(kv_index *x, uint64_t parent_size, uint64_t literal)
{
    if (parent_size < KV_MIN_RUN)
        return 0;
    x->stride = parent_size < SMALL_PARENT ? SMALL_STRIDE : literal < parent_size / 16 ? WIDE_STRIDE : STRIDE;
    x->n_samples = (parent_size - SAMPLE) / x->stride + 1;
    x->n_slots = x->n_samples + (x->stride == WIDE_STRIDE ? x->n_samples * 5 / 8 : x->n_samples / 4);
    x->n_slots = (x->n_slots / BUCKET + 4) * BUCKET; /* room for a small table behind the list, whatever the rounding */
    for (x->index_mask = 1; x->index_mask < x->n_samples; x->index_mask = x->index_mask << 1 | 1)
        ;
    /* Where there may be nothing to search, no sample is taken before it is known. */
    x->wanted = literal < KV_MIN_RUN ? UINT64_MAX : 0;
    return x->n_samples < MOST_SAMPLES ? 4 * x->n_slots : 0;
}

/* The next n samples. */
KV_INLINE void list_any(kv_index *x, const uint8_t *parent, unsigned n)
{
    uint64_t at = x->listed * x->stride;
    for (unsigned i = 0; i < n; i++, at += x->stride) {
        const uint8_t *p = parent + at + chosen(parent + at);
        const uint64_t h = hash_at(p);
        x->slots[x->listed + i] = list_key(h);
        x->has_pattern |= is_pattern(p);
    }
    x->listed += n;
}

KV_AVX2 static void list_avx2(kv_index *x, const uint8_t *parent, unsigned n)
{
    list_any(x, parent, n);
}

static void list_plain(kv_index *x, const uint8_t *parent, unsigned n)
{
    list_any(x, parent, n);
}

static void list(kv_index *x, const uint8_t *parent, unsigned n)
{
    if (has_avx2())
        list_avx2(x, parent, n);
    else
        list_plain(x, parent, n);
}

void kv_list_to(kv_index *x, const uint8_t *parent, uint64_t end)
{
    for (x->wanted = batch_end(x); x->wanted <= end; x->wanted = batch_end(x)) {
        if (end - x->wanted > FAR_BEHIND)
            for (uint64_t i = 1; i <= BATCH; i++) {
                PREFETCH(parent + x->wanted - SAMPLE + i * x->stride);
                PREFETCH(parent + x->wanted - 1 + i * x->stride);
            }
        list(x, parent, BATCH);
    }
}

void kv_list_all(kv_index *x, const uint8_t *parent, uint64_t parent_size)
{
    kv_list_to(x, parent, parent_size);
    list(x, parent, (unsigned)(x->n_samples - x->listed));
    x->filter = x->slots + x->n_samples;
    x->n_filter = x->n_slots - x->n_samples;
    memset(x->filter, 0, (size_t)(4 * x->n_filter));
    for (uint64_t i = 0; i < x->n_samples; i++)
        *filter_word(x, x->slots[i]) |= filter_bits(x->slots[i]);
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

static void add_sample(kv_index *x, const uint8_t *parent, uint64_t sample, uint64_t place, uint64_t h)
{
    const uint32_t tag = tag_of(x, h);
    uint32_t equal, empty;
    for (uint64_t bucket = bucket_of(x, h), found = 0;; bucket = next_bucket(x, bucket)) {
        for (match(x, bucket, tag, &equal, &empty); equal; equal &= equal - 1) {
            uint64_t other = place_of(x, parent, x->table[bucket + lowest_bit(equal)]);
            if (memcmp(parent + other, parent + place, WINDOW) == 0 && ++found == MAX_EQUAL)
                return;
        }
        if (empty) {
            x->table[bucket + lowest_bit(empty)] = tag | (uint32_t)(sample + 1);
            return;
        }
    }
}

int kv_table_filtered(kv_index *x, const uint8_t *parent)
{
    uint64_t left = x->n_table / 4 * 3;
    memset(x->table, 0, (size_t)(4 * x->n_table));
    for (uint64_t i = 0; i < x->n_samples; i++) {
        const uint32_t bits = filter_bits(x->slots[i]);
        if ((*filter_word(x, x->slots[i]) & bits) != bits)
            continue;
        if (left-- == 0)
            return 0;
        const uint64_t place = i * x->stride + chosen(parent + i * x->stride);
        add_sample(x, parent, i, place, hash_at(parent + place));
    }
    return 1;
}

void kv_table_all(kv_index *x, const uint8_t *parent, uint64_t parent_size)
{
    uint64_t stretch_end = 0; /* of the last stretch of a pattern */
    uint64_t places[BATCH], hashes[BATCH];
    x->table = x->slots;
    x->n_table = x->n_slots;
    memset(x->table, 0, (size_t)(4 * x->n_table));
    for (uint64_t i = 0; i < x->n_samples + BATCH; i++) {
        const unsigned k = (unsigned)(i % BATCH);
        if (i >= BATCH) {
            if (!is_pattern(parent + places[k]))
                add_sample(x, parent, i - BATCH, places[k], hashes[k]);
            else if (places[k] + WINDOW > stretch_end)
                add_pattern(x, parent, parent_size, places[k], &stretch_end);
        }
        if (i < x->n_samples) {
            const uint64_t at = i * x->stride;
            if (i + BATCH < x->n_samples) {
                PREFETCH(parent + at + BATCH * x->stride);
                PREFETCH(parent + at + BATCH * x->stride + SAMPLE);
            }
            places[k] = at + chosen(parent + at);
            hashes[k] = hash_at(parent + places[k]);
            PREFETCH(x->table + bucket_of(x, hashes[k]));
        }
    }
}
