/* The index of a parent, for the search by content: its seeds (see minimizers.h).
 *
 * The encoder's walk lists the seeds of the bytes that it has just compared, while they are in the CPU cache. Every access
 * to a large hash table misses the cache, so the table of all seeds is made only if the list shows that there is something
 * to find. */
#include "minimizers.h"

/* A smaller stride makes the index slower to build, and the search faster per byte of the child. At STRIDE the table is
 * filled to 0.8 and takes 0.98 % of the parent's size; at WIDE_STRIDE it is filled to 0.62 and takes 0.63 %. */
enum { WIDE_STRIDE = 1024, STRIDE = 512, SMALL_STRIDE = 128 };
#define SMALL_PARENT (UINT64_C(8) << 20)
#define MAX_SEEDS (UINT64_C(1) << 31)

/* Seeds handled together, in the list and in the table, while the next ones are prefetched. */
enum { BATCH = 32 };

/* Seeds that lie further behind the walk than this have left the CPU cache. */
#define FAR_BEHIND (UINT64_C(1) << 17)

/* Where the next whole batch of seeds ends in the parent; UINT64_MAX: no whole batch is left. */
KV_INLINE uint64_t next_batch_end(const kv_index *x)
{
    return x->n_seeds - x->n_listed < BATCH ? UINT64_MAX : (x->n_listed + BATCH - 1) * x->stride + WINDOW_BYTES;
}

uint64_t kv_plan(kv_index *x, uint64_t parent_size, uint64_t literal)
{
    if (parent_size < KV_MIN_RUN)
        return 0;
    x->stride = parent_size < SMALL_PARENT ? SMALL_STRIDE : literal < parent_size / 16 ? WIDE_STRIDE : STRIDE;
    x->n_seeds = (parent_size - WINDOW_BYTES) / x->stride + 1;
    x->n_slots = x->n_seeds + (x->stride == WIDE_STRIDE ? x->n_seeds * 5 / 8 : x->n_seeds / 4);
    x->n_slots = (x->n_slots / BUCKET + 4) * BUCKET; /* rounding leaves room for a small table behind the list */
    for (x->index_mask = 1; x->index_mask < x->n_seeds; x->index_mask = x->index_mask << 1 | 1)
        ;
    /* Where nothing may need a search, no seed is listed during the walk. */
    x->batch_end = literal < KV_MIN_RUN ? UINT64_MAX : 0;
    return x->n_seeds < MAX_SEEDS ? 4 * x->n_slots : 0;
}

/* Lists the next n seeds. */
KV_INLINE void list_any(kv_index *x, const uint8_t *parent, unsigned n)
{
    uint64_t at = x->n_listed * x->stride;
    for (unsigned i = 0; i < n; i++, at += x->stride) {
        const uint8_t *p = parent + at + minimizer(parent + at);
        const uint64_t h = hash_at(p);
        x->slots[x->n_listed + i] = seed_key(h);
        x->has_periodic |= is_periodic(p);
    }
    x->n_listed += n;
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

void kv_list_seeds_to(kv_index *x, const uint8_t *parent, uint64_t end)
{
    for (x->batch_end = next_batch_end(x); x->batch_end <= end; x->batch_end = next_batch_end(x)) {
        if (end - x->batch_end > FAR_BEHIND)
            for (uint64_t i = 1; i <= BATCH; i++) {
                PREFETCH(parent + x->batch_end - WINDOW_BYTES + i * x->stride);
                PREFETCH(parent + x->batch_end - 1 + i * x->stride);
            }
        list(x, parent, BATCH);
    }
}

void kv_list_seeds(kv_index *x, const uint8_t *parent, uint64_t parent_size)
{
    kv_list_seeds_to(x, parent, parent_size);
    list(x, parent, (unsigned)(x->n_seeds - x->n_listed));
    x->filter = x->slots + x->n_seeds;
    x->n_filter = x->n_slots - x->n_seeds;
    memset(x->filter, 0, (size_t)(4 * x->n_filter));
    for (uint64_t i = 0; i < x->n_seeds; i++)
        *filter_word(x, x->slots[i]) |= filter_bits(x->slots[i]);
}

static void add_periodic(kv_index *x, const uint8_t *parent, uint64_t parent_size, uint64_t at, uint64_t *end)
{
    uint64_t start, unit = least_rotation(load64(parent + at));
    periodic_run(parent, 0, parent_size, at, &start, end);
    kv_periodic *best = periodic_of(x, unit);
    if (*end - start > best->size) {
        best->unit = unit;
        best->start = start;
        best->size = *end - start;
    }
}

static void add_seed(kv_index *x, const uint8_t *parent, uint64_t seed, uint64_t position, uint64_t h)
{
    const uint32_t tag = tag_of(x, h);
    uint32_t equal, empty;
    for (uint64_t bucket = bucket_of(x, h), found = 0;; bucket = next_bucket(x, bucket)) {
        for (match(x, bucket, tag, &equal, &empty); equal; equal &= equal - 1) {
            uint64_t other = seed_position(x, parent, x->table[bucket + lowest_bit(equal)]);
            if (memcmp(parent + other, parent + position, KMER) == 0 && ++found == MAX_EQUAL)
                return;
        }
        if (empty) {
            x->table[bucket + lowest_bit(empty)] = tag | (uint32_t)(seed + 1);
            return;
        }
    }
}

int kv_table_matching(kv_index *x, const uint8_t *parent)
{
    uint64_t left = x->n_table / 4 * 3;
    memset(x->table, 0, (size_t)(4 * x->n_table));
    for (uint64_t i = 0; i < x->n_seeds; i++) {
        const uint32_t bits = filter_bits(x->slots[i]);
        if ((*filter_word(x, x->slots[i]) & bits) != bits)
            continue;
        if (left-- == 0)
            return 0;
        const uint64_t position = i * x->stride + minimizer(parent + i * x->stride);
        add_seed(x, parent, i, position, hash_at(parent + position));
    }
    return 1;
}

void kv_table_seeds(kv_index *x, const uint8_t *parent, uint64_t parent_size)
{
    uint64_t periodic_end = 0; /* of the last periodic run */
    uint64_t positions[BATCH], hashes[BATCH];
    x->table = x->slots;
    x->n_table = x->n_slots;
    memset(x->table, 0, (size_t)(4 * x->n_table));
    for (uint64_t i = 0; i < x->n_seeds + BATCH; i++) {
        const unsigned k = (unsigned)(i % BATCH);
        if (i >= BATCH) {
            if (!is_periodic(parent + positions[k]))
                add_seed(x, parent, i - BATCH, positions[k], hashes[k]);
            else if (positions[k] + KMER > periodic_end)
                add_periodic(x, parent, parent_size, positions[k], &periodic_end);
        }
        if (i < x->n_seeds) {
            const uint64_t at = i * x->stride;
            if (i + BATCH < x->n_seeds) {
                PREFETCH(parent + at + BATCH * x->stride);
                PREFETCH(parent + at + BATCH * x->stride + WINDOW_BYTES);
            }
            positions[k] = at + minimizer(parent + at);
            hashes[k] = hash_at(parent + positions[k]);
            PREFETCH(x->table + bucket_of(x, hashes[k]));
        }
    }
}
