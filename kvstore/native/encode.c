/* Encoding: a walk over sections, rows and runs of cells in the child's order. Spans of equal bytes come out one by one
 * and go through two stages, each with room for one: the span of the rule (before which the gap may be searched by
 * content), then the open COPY, which grows while spans follow on. So no op is ever recorded but in the output, and the
 * walk can stop at any full output and go on. */
#include "kernel.h"

#include "bytes.h"

static void store64(uint8_t *p, uint64_t x)
{
    for (int i = 0; i < 8; i++)
        p[i] = (uint8_t)(x >> (8 * i));
}

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
                    uint64_t n = equal_bytes(e->child + c, e->parent + p, left * s->width);
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

/* Room for `n` more bytes of output? */
static int room(kv_encoder *e, uint64_t n)
{
    if (e->out_size + n > e->limit || e->n_ops > UINT32_MAX - 2)
        return KV_REFUSED;
    if (e->out_size + n > e->out_room) {
        e->need = e->out_size + n;
        return KV_MORE;
    }
    return KV_OK;
}

static void put_literal(kv_encoder *e, uint64_t end)
{
    uint64_t n = end - e->literal;
    uint8_t *out = e->out + e->out_size;
    if (n == 0)
        return;
    out[0] = 1;
    store64(out + 1, n);
    memcpy(out + 9, e->child + e->literal, (size_t)n);
    e->out_size += 9 + n;
    e->n_ops++;
    e->literal = end;
}

/* Writes the open COPY and the literal before it. */
static int flush(kv_encoder *e)
{
    uint64_t n = e->open_child - e->literal;
    int rc = room(e, (n ? 9 + n : 0) + 17);
    if (rc != KV_OK)
        return rc;
    put_literal(e, e->open_child);
    uint8_t *out = e->out + e->out_size;
    out[0] = 0;
    store64(out + 1, e->open_parent);
    store64(out + 9, e->open_n);
    e->out_size += 17;
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
    rc = room(e, 9 + e->child_size - e->literal);
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

int kv_encode(kv_encoder *e)
{
    int rc;
    if (e->out_size == 0) {
        if (!sections_are_sound(e))
            return KV_BAD_SECTIONS;
        if ((rc = room(e, KV_HEADER)) != KV_OK)
            return rc;
        e->out_size = KV_HEADER;
    }
    for (;;) {
        if (e->hit_n) {
            if ((rc = push(e, e->hit_child, e->hit_parent, e->hit_n)) != KV_OK)
                return rc;
            e->hit_n = 0;
        }
        if (!e->waiting) {
            e->waiting = e->searching = 1;
            if (!next_span(e)) {
                e->at_end = 1;
                e->span_child = e->child_size;
                e->span_n = 0;
            }
            e->budget = (UINT64_C(1) << 20) + 64 * (e->span_child - e->gap);
        }
        if (e->index && e->searching) {
            if (e->span_child - e->gap >= KV_MIN_RUN && kv_search(e, e->gap, e->span_child))
                continue;
            e->searching = 0;
        }
        if (e->at_end)
            return finish(e);
        if ((rc = push(e, e->span_child, e->span_parent, e->span_n)) != KV_OK)
            return rc;
        e->waiting = 0;
    }
}
