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

enum { KV_HEADER = 44, KV_MIN_RUN = 4096, KV_PATTERNS = 64, KV_RECENT = 32, KV_SCREEN = 8192 };

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

/* A stretch of the parent that repeats 8 bytes. */
typedef struct {
    uint64_t pattern, start, size;
} kv_pattern;

/* Equal bytes: child[start, start + size), and the same `offset` further on in the parent. */
typedef struct {
    uint64_t offset, start, size;
} kv_short_run;

/* Windows of the child that may be equal to samples of the parent, with the marks of their gaps, and a table of them. */
typedef struct {
    unsigned n, rounds;
    uint64_t places[KV_SCREEN], bits[KV_SCREEN / 2];
    uint8_t *found[KV_SCREEN];
    uint32_t keys[KV_SCREEN];
    uint16_t table[2 * KV_SCREEN];
} kv_screen;

/* Samples of the parent, for the search by content. Zero it, call kv_plan, set `slots` (64-byte alignment is faster).
 * The slots hold a list of the samples, with a filter or a small table behind it, or a table of all. */
typedef struct {
    uint32_t *slots, *filter, *table;
    uint64_t n_slots, n_filter, n_table; /* all in slots */
    uint64_t n_samples, stride;
    uint64_t listed; /* samples of the list */
    uint64_t wanted; /* bytes of the parent up to the end of the next ones */
    uint32_t index_mask;
    int has_pattern;
    unsigned n_recent;
    kv_pattern patterns[KV_PATTERNS];
    kv_short_run recent[KV_RECENT];
    kv_screen screen;
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

    /* where the walk stands */
    int stage;
    uint64_t section, row, run, cell;
    uint64_t literal;                          /* first byte of the child that no written op has */
    uint64_t open_child, open_parent, open_n;  /* a COPY that may still grow */
    uint64_t gap;                              /* end of the last span that was pushed */
    uint64_t span_child, span_parent, span_n;  /* a span of the rule, not pushed yet */
    uint64_t hit_child, hit_parent, hit_n;     /* a span found by content, not pushed yet */
    uint64_t first_left_out, left_out, n_left_out; /* long literals of a draft: offsets in it of the first and the last */
    uint64_t draft_size, draft_at, draft_room; /* its end is at out + draft_room */
    uint64_t next_gap;                         /* offset in the draft */
    uint64_t budget;                           /* bytes that the search of this gap may still compare */
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

/* index.c. The list: of the samples before `end`; of all, with a filter of them. */
void kv_list_to(kv_index *index, const uint8_t *parent, uint64_t end);
void kv_list_all(kv_index *index, const uint8_t *parent, uint64_t parent_size);

/* The table: of all samples; of those that pass the filter, next to the list (0: they are too many). */
void kv_table_all(kv_index *index, const uint8_t *parent, uint64_t parent_size);
int kv_table_filtered(kv_index *index, const uint8_t *parent);

/* screen.c: whether kv_search can find anything in a gap. Needs the list and its filter. Sets *found (0 is certain) in this
 * call, or in a later one, or at the end. */
void kv_screen_gap(const kv_encoder *e, uint64_t from, uint64_t to, uint8_t *found);
void kv_screen_end(const kv_encoder *e);

/* Makes the filter one of the windows of gaps: empty; with those of one more. */
void kv_filter_gaps(kv_index *index);
void kv_filter_gap(const kv_encoder *e, uint64_t from, uint64_t to);

/* search.c: the next run of KV_MIN_RUN bytes or more of child[from, to) that the parent has, into e->hit_*; 0: none. */
int kv_search(kv_encoder *e, uint64_t from, uint64_t to);

#endif
