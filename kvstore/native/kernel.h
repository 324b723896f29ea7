/* The kernel of the BKVD codec. It knows no Python, keeps no globals and allocates nothing: every buffer is the caller's.
 * Sizes and offsets are in bytes unless said otherwise. Inputs may change while a call runs (another thread holds the
 * same memory): the result is then undefined, every access stays in bounds. */
#ifndef KVSTORE_KERNEL_H
#define KVSTORE_KERNEL_H

#include <stdint.h>

/* cdef: begin */
enum {
    KV_OK = 0,
    KV_MORE = 1,          /* encode: give `need` bytes of output and call again */
    KV_REFUSED = 2,       /* encode: the delta would be larger than `limit`, or have too many ops */
    KV_BAD_SECTIONS = 3,  /* encode: sections out of order or out of bounds */
    KV_TRUNCATED = 4,     /* decode, in the order of the format's messages */
    KV_TRUNCATED_LITERAL = 5,
    KV_COPY_RANGE = 6,
    KV_UNKNOWN_OP = 7,
    KV_SIZE_MISMATCH = 8
};

enum { KV_HEADER = 44, KV_MIN_RUN = 4096, KV_PERIODIC = 64, KV_RECENT = 32, KV_CANDIDATES = 8192 };

/* Cells child .. child + cells stand at parent .. parent + cells in the parent's stream. */
typedef struct {
    uint64_t child, parent, cells;
} kv_run;

/* A tensor that both sides have: `rows` rows, `width` bytes a cell, the runs first_run .. first_run + n_runs. */
typedef struct {
    uint64_t child, parent;          /* where it starts */
    uint64_t child_row, parent_row;  /* bytes of one row */
    uint64_t rows, width;
    uint64_t first_run, n_runs;
} kv_section;

/* A run of the parent that repeats the same 8 bytes, `unit`. */
typedef struct {
    uint64_t unit, start, size;
} kv_periodic;

/* Equal bytes: child[start, start + size) and parent[start + offset, start + offset + size). */
typedef struct {
    uint64_t offset, start, size;
} kv_short_run;

/* Candidates: k-mers of the child that passed the filter and may equal a seed. Each points to the mark of its literal gap.
 * `bits` and `table` find a candidate by its key. */
typedef struct {
    unsigned n, rounds;
    uint64_t positions[KV_CANDIDATES], bits[KV_CANDIDATES / 2];
    uint8_t *found[KV_CANDIDATES];
    uint32_t keys[KV_CANDIDATES];
    uint16_t table[2 * KV_CANDIDATES];
} kv_prefilter;

/* The seeds of the parent, for the search by content. Zero it, call kv_plan, set `slots` (64-byte alignment is faster).
 * The slots hold the seed list followed by a filter or a small table; or they hold one table of all seeds. */
typedef struct {
    uint32_t *slots, *filter, *table;
    uint64_t n_slots, n_filter, n_table; /* all in slots */
    uint64_t n_seeds, stride;
    uint64_t n_listed;  /* seeds in the list so far */
    uint64_t batch_end; /* where the next batch of seeds ends in the parent */
    uint32_t index_mask;
    int has_periodic;
    unsigned n_recent;
    kv_periodic periodic[KV_PERIODIC];
    kv_short_run recent[KV_RECENT];
    kv_prefilter prefilter;
} kv_index;

/* One encoding. Zero it, set the first block; set `out` and `out_room` before each call. */
typedef struct {
    const uint8_t *child, *parent;
    uint64_t child_size, parent_size;
    const kv_section *sections;
    uint64_t n_sections;
    const kv_run *runs;
    uint64_t n_runs;
    uint64_t limit;   /* the most bytes the delta may have */
    kv_index *index;  /* NULL: no search by content */

    uint8_t *out;
    uint64_t out_room;

    uint64_t out_size, need;
    uint64_t shared, n_ops;

    /* the state of the walk */
    int stage;
    uint64_t section, row, run, cell;
    uint64_t literal;                          /* first byte of the child that no written op covers */
    uint64_t open_child, open_parent, open_n;  /* a COPY that may still grow */
    uint64_t gap_start;                        /* end of the last span pushed: here a literal gap begins */
    uint64_t span_child, span_parent, span_n;  /* a span of the rule, not pushed yet */
    uint64_t hit_child, hit_parent, hit_n;     /* a span found by content, not pushed yet */
    uint64_t first_elided, last_elided, n_elided; /* elided literals: offsets of the first and the last in the outline */
    uint64_t outline_size, outline_at, outline_room; /* the outline ends at out + outline_room */
    uint64_t next_gap;                         /* the next elided literal: offset in the outline */
    uint64_t budget;                           /* bytes that the search of this literal gap may still compare */
    int waiting, in_gap, searching;
} kv_encoder;

/* FNV-1a over the first and the last min(n, 1 MiB) bytes, XOR n: the format's parent hash. */
uint64_t kv_sample_hash(const uint8_t *p, uint64_t n);

/* Writes the ops (not the header: its 44 bytes are left free) to e->out. KV_OK: done, e->out_size bytes.
 * KV_MORE: the output is full; nothing is lost, go on with a larger one that holds the same bytes. */
int kv_encode(kv_encoder *e);

/* Plans an index of this parent, for a child of which at least `literal` bytes will be searched. Gives the bytes that
 * `slots` must have, at most 1 % of the parent from 8 MiB on; 0: it cannot be searched. */
uint64_t kv_plan(kv_index *index, uint64_t parent_size, uint64_t literal);

/* Checks every op and adds up the output's size, saturating. Writes nothing else. */
int kv_check(const uint8_t *delta, uint64_t n, uint64_t parent_size, uint64_t *out_size);

/* Writes the output. Checks again as it goes: the delta may have changed since kv_check. */
int kv_apply(const uint8_t *delta, uint64_t n, const uint8_t *parent, uint64_t parent_size, uint8_t *out,
             uint64_t out_size);
/* cdef: end */

/* index.c. Extends the seed list to the seeds that lie before `end`; completes the list and makes a filter of it. */
void kv_list_seeds_to(kv_index *index, const uint8_t *parent, uint64_t end);
void kv_list_seeds(kv_index *index, const uint8_t *parent, uint64_t parent_size);

/* Makes the table of all seeds; of the seeds that pass the filter, beside the list (0: too many pass). */
void kv_table_seeds(kv_index *index, const uint8_t *parent, uint64_t parent_size);
int kv_table_matching(kv_index *index, const uint8_t *parent);

/* prefilter.c: can kv_search find anything in the literal gap child[from, to)? Needs the seed list and its filter. Sets
 * *found in this call, in a later one, or in kv_prefilter_end; 0 after that is certain. */
void kv_prefilter_gap(const kv_encoder *e, uint64_t from, uint64_t to, uint8_t *found);
void kv_prefilter_end(const kv_encoder *e);

/* Replaces the filter of seeds by one of literal gaps: makes it empty; adds the minimizers of one gap. */
void kv_filter_reset(kv_index *index);
void kv_filter_add_gap(const kv_encoder *e, uint64_t from, uint64_t to);

/* search.c: the next run of KV_MIN_RUN bytes or more of child[from, to) that the parent has, into e->hit_*; 0: none. */
int kv_search(kv_encoder *e, uint64_t from, uint64_t to);

#endif
