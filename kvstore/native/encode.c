/* Encoding: a walk over sections, rows and runs of cells in the child's order. Spans of equal bytes come out one by one and
 * go through two stages, each with room for one: the span of the rule, then the open COPY, which grows while spans follow
 * on. So no op is ever recorded but in the output, and the walk can stop at any full output and go on.
 *
 * The search by content needs samples of all of the parent, and the cheapest time to take them is the walk, while the bytes
 * are in the cache. So the walk writes a draft, in which literals that are long enough for a search are left out. The
 * draft is then moved to the end of the output and taken from there, while the ops that come of it fill the output from
 * the start: what is left of the draft never needs more room than they will. */
#include "kernel.h"

#include "bytes.h"

enum { START, WALK, DRAFT, REWRITE }; /* stages */

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

/* equal_bytes, which takes up samples of the parent that it comes past. */
static uint64_t compare(const kv_encoder *e, uint64_t child, uint64_t parent, uint64_t n)
{
    enum { PIECE = 1 << 15 };
    if (!e->index)
        return equal_bytes(e->child + child, e->parent + parent, n);
    for (uint64_t i = 0;;) {
        const uint64_t piece = n - i < PIECE ? n - i : PIECE;
        const uint64_t equal = equal_bytes(e->child + child + i, e->parent + parent + i, piece);
        i += equal;
        if (parent + i >= e->index->wanted)
            kv_list_to(e->index, e->parent, parent + i);
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

/* In a draft, a literal that was left out: op, size, place in the child, offset in the draft of the next of its kind. */
enum { LEFT_OUT = 25, COPY = 17, LITERAL = 9 };
enum { LEAVE_IT, SEARCH_IT }; /* such an op */

/* Gaps that are less than this part of the parent get a table of their own. */
enum { FEW = 512 };

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Room for `n` more bytes of output? */
static int room(kv_encoder *e, uint64_t n)
{
    const uint64_t draft = e->draft_size - e->draft_at;
    /* What was left out may be found, each gap become part of a COPY. */
    if (e->out_size + n > e->limit + e->n_left_out * (LEFT_OUT + COPY) || e->n_ops > UINT32_MAX - 2)
        return KV_REFUSED;
    if (e->out_size + n > e->out_room - draft) {
        e->need = e->out_size + n + draft + least(draft, e->child_size / 256); /* the draft is moved each time */
        return KV_MORE;
    }
    return KV_OK;
}

static int is_left_out(const kv_encoder *e, uint64_t n)
{
    return e->stage == DRAFT && n >= KV_MIN_RUN;
}

/* Bytes of the output that a literal takes. */
static uint64_t literal_size(const kv_encoder *e, uint64_t n)
{
    return n == 0 ? 0 : is_left_out(e, n) ? LEFT_OUT : LITERAL + n;
}

static void put_literal(kv_encoder *e, uint64_t end)
{
    uint64_t n = end - e->literal;
    uint8_t *out = e->out + e->out_size;
    if (n == 0)
        return;
    out[0] = 1;
    set64(out + 1, n);
    if (is_left_out(e, n)) {
        set64(out + 9, e->literal);
        if (e->n_left_out++)
            set64(e->out + KV_HEADER + e->left_out + 17, e->out_size - KV_HEADER);
        else
            e->first_left_out = e->out_size - KV_HEADER;
        e->left_out = e->out_size - KV_HEADER;
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
            e->gap = child + n;
            return KV_OK;
        }
        int rc = flush(e);
        if (rc != KV_OK)
            return rc;
    }
    e->open_child = child;
    e->open_parent = parent;
    e->open_n = n;
    e->gap = child + n;
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

static uint8_t *draft(const kv_encoder *e, uint64_t at)
{
    return e->out + (e->out_room - e->draft_size + at);
}

/* Takes the next op, a COPY, out of the draft: it will be written again, perhaps as part of a longer one. */
static void take_copy(kv_encoder *e, uint64_t *parent, uint64_t *n)
{
    const uint8_t *p = draft(e, e->draft_at);
    *parent = get64(p + 1);
    *n = get64(p + 9);
    e->draft_at += COPY;
    e->n_ops--;
    e->shared -= *n;
}

/* The next gap that a literal was left out of, from the draft. */
static void take_gap(kv_encoder *e)
{
    const uint8_t *p = draft(e, e->draft_at);
    e->searching = p[0] == SEARCH_IT;
    e->gap = get64(p + 9);
    e->span_child = e->gap + get64(p + 1);
    e->draft_at += LEFT_OUT;
    e->n_ops--;
    e->in_gap = 1;
    e->next_gap = --e->n_left_out ? get64(p + 17) : e->draft_size;
    e->budget = (UINT64_C(1) << 20) + 64 * (e->span_child - e->gap);
}

/* Marks the gaps of the draft, which begins at e->out + KV_HEADER, that are worth a search, and readies the index for them.
 * Gives the bytes of the other gaps. */
static uint64_t plan_search(kv_encoder *e)
{
    uint8_t *const start = e->out + KV_HEADER, *p = start + e->first_left_out;
    uint64_t found = 0, others = 0;
    for (uint64_t i = 0; i < e->n_left_out; i++, p = start + get64(p + 17))
        kv_screen_gap(e, get64(p + 9), get64(p + 9) + get64(p + 1), p);
    kv_screen_end(e);
    p = start + e->first_left_out;
    for (uint64_t i = 0; i < e->n_left_out; i++, p = start + get64(p + 17))
        *(p[0] == SEARCH_IT ? &found : &others) += get64(p + 1);
    if (found == 0)
        return others;
    if (found <= e->parent_size / FEW && !e->index->has_pattern) {
        kv_filter_gaps(e->index);
        p = start + e->first_left_out;
        for (uint64_t i = 0; i < e->n_left_out; i++, p = start + get64(p + 17))
            if (p[0] == SEARCH_IT)
                kv_filter_gap(e, get64(p + 9), get64(p + 9) + get64(p + 1));
        if (kv_table_filtered(e->index, e->parent))
            return others;
    }
    kv_table_all(e->index, e->parent, e->parent_size);
    return others;
}

/* From the draft to the delta. A draft is gaps with stretches of other ops between. A stretch is moved as it is, but for
 * the COPY at either end, which may grow into the gap. */
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
            if (e->searching && e->span_child - e->gap >= KV_MIN_RUN && kv_search(e, e->gap, e->span_child))
                continue;
            e->in_gap = 0;
            if (e->draft_at < e->draft_size) {
                take_copy(e, &e->span_parent, &e->span_n);
                e->waiting = 1;
            }
        }
        if (e->waiting) {
            if ((rc = push(e, e->span_child, e->span_parent, e->span_n)) != KV_OK)
                return rc;
            e->waiting = 0;
        }
        if (e->draft_at == e->draft_size)
            return finish(e);
        if (e->draft_at < e->next_gap) {
            if (e->open_n && (rc = flush(e)) != KV_OK)
                return rc;
            const uint64_t end = e->next_gap == e->draft_size ? e->next_gap : e->next_gap - COPY;
            memmove(e->out + e->out_size, draft(e, e->draft_at), (size_t)(end - e->draft_at));
            e->out_size += end - e->draft_at;
            e->draft_at = end;
            if (end == e->draft_size) {
                e->literal = e->child_size;
                return room(e, 0);
            }
            take_copy(e, &e->open_parent, &e->open_n);
            e->literal = e->open_child = get64(draft(e, e->next_gap) + 9) - e->open_n;
        }
        take_gap(e);
    }
}

/* Moves what is left of the draft to the end of the output, which may have grown. */
static void move_draft(kv_encoder *e)
{
    const uint8_t *old = e->out + (e->draft_room - e->draft_size + e->draft_at);
    memmove(draft(e, e->draft_at), old, (size_t)(e->draft_size - e->draft_at));
    e->draft_room = e->out_room;
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
        e->stage = e->index ? DRAFT : WALK;
    }
    if (e->stage != REWRITE) {
        rc = walk(e);
        if (rc != KV_OK || e->n_left_out == 0)
            return rc;
        kv_list_all(e->index, e->parent, e->parent_size);
        e->need = e->out_size + plan_search(e);
        e->draft_size = e->out_size - KV_HEADER;
        e->draft_room = e->out_size;
        e->stage = REWRITE;
        e->out_size = KV_HEADER;
        e->literal = 0;
        e->next_gap = e->first_left_out;
        if (e->need > e->limit + e->n_left_out * (LEFT_OUT + COPY))
            return KV_REFUSED;
        /* A small draft is moved more often, so that new memory is written while it is in the cache. */
        if (e->need > e->out_room && e->draft_size > e->child_size / 256)
            return KV_MORE;
    }
    if (e->out_room != e->draft_room)
        move_draft(e);
    return rewrite(e);
}
