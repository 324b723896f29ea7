/* Encoding: a walk over sections, rows and runs of cells in the child's order. The walk yields spans of equal bytes one at a
 * time. A span passes through two one-element stages: the pending span of the rule, then the open COPY, which grows as long
 * as spans continue it. Ops are recorded in the output only, so the walk can stop whenever the output is full, and resume.
 *
 * With the search by content there are two passes, because the search needs seeds of all of the parent, and listing them is
 * cheapest during the walk, while the bytes are in the CPU cache. Pass 1, the walk, writes an outline: the delta without the
 * bytes of long literals (literal gaps), which are elided. Pass 2 moves the outline to the end of the output buffer and
 * rewrites it from the start: a gap becomes the COPYs that the search finds and the literals between them. The unread rest of
 * the outline counts as used in room(), so the write position never overtakes the read position. */
#include "kernel.h"

#include "bytes.h"

enum { START, WALK, OUTLINE, REWRITE }; /* stages */

static uint64_t fnv1a(uint64_t h, const uint8_t *p, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        h = (h ^ p[i]) * UINT64_C(1099511628211);
    return h;
}

uint64_t kv_sample_hash(const uint8_t *p, uint64_t n)
{
    uint64_t part = n < (UINT64_C(1) << 20) ? n : UINT64_C(1) << 20;
    uint64_t h = fnv1a(UINT64_C(1469598103934665603), p, part);
    return fnv1a(h, p + (n - part), part) ^ n;
}

/* The number of leading cells that differ, at least 1; the first is known to. Narrow cells are worth a scan. */
static uint64_t different_cells(const uint8_t *a, const uint8_t *b, uint64_t cells, uint64_t width)
{
    uint64_t i = 1;
    if (width == 2) {
#if KV_SSE2
        for (; cells - i >= 8; i += 8) {
            __m128i x = _mm_loadu_si128((const __m128i *)(a + 2 * i));
            __m128i y = _mm_loadu_si128((const __m128i *)(b + 2 * i));
            if (_mm_movemask_epi8(_mm_cmpeq_epi16(x, y)) != 0)
                break;
        }
#endif
        while (i < cells && (a[2 * i] != b[2 * i] || a[2 * i + 1] != b[2 * i + 1]))
            i++;
    } else if (width == 4) {
#if KV_SSE2
        for (; cells - i >= 4; i += 4) {
            __m128i x = _mm_loadu_si128((const __m128i *)(a + 4 * i));
            __m128i y = _mm_loadu_si128((const __m128i *)(b + 4 * i));
            if (_mm_movemask_epi8(_mm_cmpeq_epi32(x, y)) != 0)
                break;
        }
#endif
        while (i < cells && memcmp(a + 4 * i, b + 4 * i, 4) != 0)
            i++;
    }
    return i;
}

/* equal_bytes, which also lists the seeds of the parent bytes that it reads. */
static uint64_t compare(const kv_encoder *e, uint64_t child, uint64_t parent, uint64_t n)
{
    enum { PIECE = 1 << 15 };
    if (!e->index)
        return equal_bytes(e->child + child, e->parent + parent, n);
    for (uint64_t i = 0;;) {
        const uint64_t piece = n - i < PIECE ? n - i : PIECE;
        const uint64_t equal = equal_bytes(e->child + child + i, e->parent + parent + i, piece);
        i += equal;
        if (parent + i >= e->index->batch_end)
            kv_list_seeds_to(e->index, e->parent, parent + i);
        if (equal < piece || i == n)
            return i;
    }
}

/* The next span of the rule, into e->span_*; 0: there is none. */
static int next_span(kv_encoder *e)
{
    for (; e->section < e->n_sections; e->section++, e->row = 0) {
        const kv_section *s = &e->sections[e->section];
        for (; e->row < s->rows; e->row++, e->run = 0) {
            uint64_t child_row = s->child + e->row * s->child_row;
            uint64_t parent_row = s->parent + e->row * s->parent_row;
            for (; e->run < s->n_runs; e->run++, e->cell = 0) {
                const kv_run *r = &e->runs[s->first_run + e->run];
                while (e->cell < r->cells) {
                    uint64_t left = r->cells - e->cell;
                    uint64_t c = child_row + (r->child + e->cell) * s->width;
                    uint64_t p = parent_row + (r->parent + e->cell) * s->width;
                    uint64_t n = compare(e, c, p, left * s->width);
                    uint64_t cells = n == left * s->width ? left : n / s->width;
                    if (cells == 0) {
                        e->cell += different_cells(e->child + c, e->parent + p, left, s->width);
                        continue;
                    }
                    e->span_child = c;
                    e->span_parent = p;
                    e->span_n = cells * s->width;
                    e->cell += cells + (cells < left); /* the cell after them differs */
                    return 1;
                }
            }
        }
    }
    return 0;
}

/* An elided literal of the outline: op, size, position in the child, offset in the outline of the next elided literal. */
enum { ELIDED = 25, COPY = 17, LITERAL = 9 };
enum { LEAVE_IT, SEARCH_IT }; /* the op byte of an elided literal */

/* If all literal gaps together are smaller than 1/SMALL_GAPS of the parent, only the seeds that they may match get a table. */
enum { SMALL_GAPS = 512 };

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Room for `n` more bytes of output? */
static int room(kv_encoder *e, uint64_t n)
{
    const uint64_t outline = e->outline_size - e->outline_at;
    /* A gap may turn out to be parent bytes: then its op and a COPY beside it vanish. */
    if (e->out_size + n > e->limit + e->n_elided * (ELIDED + COPY) || e->n_ops > UINT32_MAX - 2)
        return KV_REFUSED;
    if (e->out_size + n > e->out_room - outline) {
        e->need = e->out_size + n + outline + least(outline, e->child_size / 256); /* each growth moves the outline */
        return KV_MORE;
    }
    return KV_OK;
}

static int is_elided(const kv_encoder *e, uint64_t n)
{
    return e->stage == OUTLINE && n >= KV_MIN_RUN;
}

/* Bytes of the output that a literal takes. */
static uint64_t literal_size(const kv_encoder *e, uint64_t n)
{
    return n == 0 ? 0 : is_elided(e, n) ? ELIDED : LITERAL + n;
}

static void put_literal(kv_encoder *e, uint64_t end)
{
    uint64_t n = end - e->literal;
    uint8_t *out = e->out + e->out_size;
    if (n == 0)
        return;
    out[0] = 1;
    set64(out + 1, n);
    if (is_elided(e, n)) {
        set64(out + 9, e->literal);
        if (e->n_elided++)
            set64(e->out + KV_HEADER + e->last_elided + 17, e->out_size - KV_HEADER);
        else
            e->first_elided = e->out_size - KV_HEADER;
        e->last_elided = e->out_size - KV_HEADER;
    } else {
        memcpy(out + LITERAL, e->child + e->literal, (size_t)n);
    }
    e->out_size += literal_size(e, n);
    e->n_ops++;
    e->literal = end;
}

/* Writes the open COPY and the literal before it. */
static int flush(kv_encoder *e)
{
    int rc = room(e, literal_size(e, e->open_child - e->literal) + COPY);
    if (rc != KV_OK)
        return rc;
    put_literal(e, e->open_child);
    uint8_t *out = e->out + e->out_size;
    out[0] = 0;
    set64(out + 1, e->open_parent);
    set64(out + 9, e->open_n);
    e->out_size += COPY;
    e->n_ops++;
    e->shared += e->open_n;
    e->literal = e->open_child + e->open_n;
    e->open_n = 0;
    return KV_OK;
}

static int push(kv_encoder *e, uint64_t child, uint64_t parent, uint64_t n)
{
    if (e->open_n) {
        if (child == e->open_child + e->open_n && parent == e->open_parent + e->open_n) {
            e->open_n += n;
            e->gap_start = child + n;
            return KV_OK;
        }
        int rc = flush(e);
        if (rc != KV_OK)
            return rc;
    }
    e->open_child = child;
    e->open_parent = parent;
    e->open_n = n;
    e->gap_start = child + n;
    return KV_OK;
}

static int finish(kv_encoder *e)
{
    int rc = e->open_n ? flush(e) : KV_OK;
    if (rc != KV_OK || e->literal == e->child_size)
        return rc;
    rc = room(e, literal_size(e, e->child_size - e->literal));
    if (rc == KV_OK)
        put_literal(e, e->child_size);
    return rc;
}

static int fits(uint64_t start, uint64_t rows, uint64_t row, uint64_t size)
{
    return start <= size && (row == 0 || rows <= (size - start) / row);
}

/* The walk relies on this: every cell of every run lies in both states, and sections and runs ascend in the child. */
static int sections_are_sound(const kv_encoder *e)
{
    uint64_t end = 0;
    for (uint64_t i = 0; i < e->n_sections; i++) {
        const kv_section *s = &e->sections[i];
        if (s->width == 0 || s->child < end || !fits(s->child, s->rows, s->child_row, e->child_size) ||
            !fits(s->parent, s->rows, s->parent_row, e->parent_size))
            return 0;
        if (s->first_run > e->n_runs || s->n_runs > e->n_runs - s->first_run)
            return 0;
        end = s->child + s->rows * s->child_row;
        uint64_t child_cells = s->child_row / s->width, parent_cells = s->parent_row / s->width, cell = 0;
        for (uint64_t k = 0; k < s->n_runs; k++) {
            const kv_run *r = &e->runs[s->first_run + k];
            if (r->child < cell || r->child > child_cells || r->cells > child_cells - r->child ||
                r->parent > parent_cells || r->cells > parent_cells - r->parent)
                return 0;
            cell = r->child + r->cells;
        }
    }
    return 1;
}

/* All spans of the rule. */
static int walk(kv_encoder *e)
{
    for (; e->waiting || next_span(e); e->waiting = 0) {
        e->waiting = 1;
        int rc = push(e, e->span_child, e->span_parent, e->span_n);
        if (rc != KV_OK)
            return rc;
    }
    return finish(e);
}

static uint8_t *outline(const kv_encoder *e, uint64_t at)
{
    return e->out + (e->out_room - e->outline_size + at);
}

/* Reads the next op of the outline, a COPY, and uncounts it: it is written again, perhaps as part of a longer one. */
static void take_copy(kv_encoder *e, uint64_t *parent, uint64_t *n)
{
    const uint8_t *p = outline(e, e->outline_at);
    *parent = get64(p + 1);
    *n = get64(p + 9);
    e->outline_at += COPY;
    e->n_ops--;
    e->shared -= *n;
}

/* Reads the next elided literal of the outline and makes it the current literal gap. */
static void take_gap(kv_encoder *e)
{
    const uint8_t *p = outline(e, e->outline_at);
    e->searching = p[0] == SEARCH_IT;
    e->gap_start = get64(p + 9);
    e->span_child = e->gap_start + get64(p + 1);
    e->outline_at += ELIDED;
    e->n_ops--;
    e->in_gap = 1;
    e->next_gap = --e->n_elided ? get64(p + 17) : e->outline_size;
    e->budget = (UINT64_C(1) << 20) + 64 * (e->span_child - e->gap_start);
}

/* Marks the literal gaps that are worth a search, and makes the table of seeds for them. The outline begins at
 * e->out + KV_HEADER. Returns the bytes of the gaps that are not worth one. */
static uint64_t plan_search(kv_encoder *e)
{
    uint8_t *const start = e->out + KV_HEADER, *p = start + e->first_elided;
    uint64_t found = 0, others = 0;
    for (uint64_t i = 0; i < e->n_elided; i++, p = start + get64(p + 17))
        kv_prefilter_gap(e, get64(p + 9), get64(p + 9) + get64(p + 1), p);
    kv_prefilter_end(e);
    p = start + e->first_elided;
    for (uint64_t i = 0; i < e->n_elided; i++, p = start + get64(p + 17))
        *(p[0] == SEARCH_IT ? &found : &others) += get64(p + 1);
    if (found == 0)
        return others;
    if (found <= e->parent_size / SMALL_GAPS && !e->index->has_periodic) {
        kv_filter_reset(e->index);
        p = start + e->first_elided;
        for (uint64_t i = 0; i < e->n_elided; i++, p = start + get64(p + 17))
            if (p[0] == SEARCH_IT)
                kv_filter_add_gap(e, get64(p + 9), get64(p + 9) + get64(p + 1));
        if (kv_table_matching(e->index, e->parent))
            return others;
    }
    kv_table_seeds(e->index, e->parent, e->parent_size);
    return others;
}

/* Pass 2: from the outline to the delta. The outline alternates literal gaps and sequences of other ops. A sequence is moved
 * unchanged, except for the COPY at either end, which may grow into the gap. */
static int rewrite(kv_encoder *e)
{
    int rc;
    for (;;) {
        if (e->hit_n) {
            if ((rc = push(e, e->hit_child, e->hit_parent, e->hit_n)) != KV_OK)
                return rc;
            e->hit_n = 0;
        }
        if (e->in_gap) {
            if (e->searching && e->span_child - e->gap_start >= KV_MIN_RUN && kv_search(e, e->gap_start, e->span_child))
                continue;
            e->in_gap = 0;
            if (e->outline_at < e->outline_size) {
                take_copy(e, &e->span_parent, &e->span_n);
                e->waiting = 1;
            }
        }
        if (e->waiting) {
            if ((rc = push(e, e->span_child, e->span_parent, e->span_n)) != KV_OK)
                return rc;
            e->waiting = 0;
        }
        if (e->outline_at == e->outline_size)
            return finish(e);
        if (e->outline_at < e->next_gap) {
            if (e->open_n && (rc = flush(e)) != KV_OK)
                return rc;
            const uint64_t end = e->next_gap == e->outline_size ? e->next_gap : e->next_gap - COPY;
            memmove(e->out + e->out_size, outline(e, e->outline_at), (size_t)(end - e->outline_at));
            e->out_size += end - e->outline_at;
            e->outline_at = end;
            if (end == e->outline_size) {
                e->literal = e->child_size;
                return room(e, 0);
            }
            take_copy(e, &e->open_parent, &e->open_n);
            e->literal = e->open_child = get64(outline(e, e->next_gap) + 9) - e->open_n;
        }
        take_gap(e);
    }
}

/* Moves the unread rest of the outline to the end of the output buffer, which may have grown. */
static void move_outline(kv_encoder *e)
{
    const uint8_t *old = e->out + (e->outline_room - e->outline_size + e->outline_at);
    memmove(outline(e, e->outline_at), old, (size_t)(e->outline_size - e->outline_at));
    e->outline_room = e->out_room;
}

int kv_encode(kv_encoder *e)
{
    int rc;
    if (e->stage == START) {
        if (!sections_are_sound(e))
            return KV_BAD_SECTIONS;
        if ((rc = room(e, KV_HEADER)) != KV_OK)
            return rc;
        e->out_size = KV_HEADER;
        e->stage = e->index ? OUTLINE : WALK;
    }
    if (e->stage != REWRITE) {
        rc = walk(e);
        if (rc != KV_OK || e->n_elided == 0)
            return rc;
        kv_list_seeds(e->index, e->parent, e->parent_size);
        e->need = e->out_size + plan_search(e);
        e->outline_size = e->out_size - KV_HEADER;
        e->outline_room = e->out_size;
        e->stage = REWRITE;
        e->out_size = KV_HEADER;
        e->literal = 0;
        e->next_gap = e->first_elided;
        if (e->need > e->limit + e->n_elided * (ELIDED + COPY))
            return KV_REFUSED;
        /* A small outline is cheap to move, so the output grows step by step, and new memory is used while it is cached. */
        if (e->need > e->out_room && e->outline_size > e->child_size / 256)
            return KV_MORE;
    }
    if (e->out_room != e->outline_room)
        move_outline(e);
    return rewrite(e);
}
