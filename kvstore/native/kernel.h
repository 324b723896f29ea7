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
    KV_SIZE_MISMATCH = 8,
    KV_NOT_SHARED = 9,    /* chain: no header of a delta */
    KV_WRONG_PARENT = 10  /* chain: a link has another size than the link before it says */
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

/* n bytes of the output, at dst, that are still lacking, and where they are in the state of the next link. */
typedef struct {
    uint64_t dst, src, n;
} kv_range;

/* How far a link is read. */
typedef struct {
    uint64_t pos;          /* bytes of the link's state that the ops so far give */
    uint64_t range;        /* the first range that may lack bytes from pos on */
    uint64_t left, source; /* of the op: bytes of the state, offset in the parent */
    uint64_t n_ops;        /* that follow */
    unsigned code, stage, n_head;
    uint8_t head[44];      /* the first n_head bytes of a header or op, whose others are in the next block */
} kv_chain_walk;

/* The decoding of a chain of deltas. Zero it, set `size`, the output and the three arrays (`ranges` and `made` have `room`
 * elements, at least 1), then for each link, from the leaf to the root: kv_chain_begin, kv_chain_read for each block,
 * kv_chain_end. `out` has `size` bytes, from the first kv_chain_read on. At KV_MORE, grow `ranges` and `made` (kv_chain_read)
 * or `repeats` to `need_repeats` elements (kv_chain_end), and call again. */
typedef struct {
    uint64_t size;
    uint8_t *out;
    kv_range *ranges, *made, *repeats; /* lacking in this link, and in the next one; copies inside the output */
    uint64_t room, repeats_room, need_repeats;
    uint64_t n_ranges, n_made, n_repeats;
    uint64_t level, expected; /* the link's number, and the size that its state must have */
    uint64_t stored, seen;    /* bytes of the link, and of these read so far */
    uint64_t parent_id, parent_size, parent_hash, link_size; /* from its header */
    int full, excess, ended;
    kv_chain_walk walk;
} kv_chain;

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

/* What an op of the parent gives: bytes from `start` on of its state, found at `at` in the parent's parent (copy) or delta. */
typedef struct {
    uint64_t start, at, copy;
} kv_piece;

/* Zero it and set the first block; `pieces` has one element more than the parent has ops. Both deltas have full headers. */
typedef struct {
    const uint8_t *child, *parent;       /* deltas */
    uint64_t child_bytes, parent_bytes;
    uint64_t base_size;                  /* of the state that the parent copies from */
    kv_piece *pieces;
    uint64_t pieces_room;
    uint64_t limit;                      /* the most bytes the result may have */

    uint8_t *out;
    uint64_t out_room;

    uint64_t out_size, need;
    uint64_t shared, n_ops;

    int stage;
    unsigned open;                       /* the kind of the last op written, which may grow */
    uint64_t open_at, open_source, open_n;
    uint64_t n_pieces, piece;
    uint64_t child_at, child_ops;
    uint64_t source, left;               /* of the child's COPY at hand */
} kv_composer;

/* Writes the ops (not the header: its 44 bytes are left free) of the child's state as a delta against the parent's parent.
 * KV_MORE: as kv_encode. KV_REFUSED: larger than `limit`, or too many ops. */
int kv_compose(kv_composer *c);

/* Starts a link of `stored` bytes: a delta, or (full) the whole state at the end of the chain. */
void kv_chain_begin(kv_chain *c, int full, uint64_t stored);

/* Reads the next n bytes of the link. *used: how many of them are done with, all but for KV_MORE. */
int kv_chain_read(kv_chain *c, const uint8_t *block, uint64_t n, uint64_t *used);

/* Ends a link. */
int kv_chain_end(kv_chain *c);

/* Completes the output, after the root. */
void kv_chain_finish(kv_chain *c);
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
