/* Composing two deltas: the child's ops in order, each COPY replaced by the parent's ops that give those bytes. */
#include "ops.h"

enum { OP_COPY, OP_LITERAL, OP_NONE };

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Lists the parent's ops by the bytes they give; the last piece is where they end. */
static int list_pieces(kv_composer *c)
{
    uint64_t at = KV_HEADER, start = 0, n = 0;
    op o = {0};
    for (uint64_t i = get32(c->parent + 40); i > 0; i--) {
        const int rc = next_op(c->parent, c->parent_bytes, &at, c->base_size, &o);
        if (rc != KV_OK)
            return rc;
        if (o.n == 0)
            continue;
        if (n + 1 >= c->pieces_room || o.n > UINT64_MAX - start)
            return KV_SIZE_MISMATCH;
        c->pieces[n].start = start;
        c->pieces[n].at = o.copy ? o.at : (uint64_t)(o.from - c->parent);
        c->pieces[n++].copy = (uint64_t)o.copy;
        start += o.n;
    }
    if (at != c->parent_bytes)
        return KV_SIZE_MISMATCH;
    c->pieces[n].start = start;
    c->n_pieces = n;
    return KV_OK;
}

/* Makes c->piece the one that gives byte `at` of the parent's state; there is one. Ops mostly ascend. */
static void find_piece(kv_composer *c, uint64_t at)
{
    const kv_piece *p = c->pieces;
    uint64_t low = c->piece < c->n_pieces ? c->piece : 0;
    if (p[low].start <= at) {
        for (unsigned i = 0; i < 4 && low < c->n_pieces; i++, low++)
            if (at < p[low + 1].start) {
                c->piece = low;
                return;
            }
    } else {
        low = 0;
    }
    uint64_t high = c->n_pieces; /* p[low].start <= at < p[high].start */
    while (high - low > 1) {
        const uint64_t middle = low + (high - low) / 2;
        if (p[middle].start <= at)
            low = middle;
        else
            high = middle;
    }
    c->piece = low;
}

/* Makes room for `size` bytes more, the first of them those of a new op if `begins`. */
static int room(kv_composer *c, uint64_t size, int begins)
{
    if (size > c->limit - c->out_size || (begins && c->n_ops == UINT32_MAX))
        return KV_REFUSED;
    if (size > c->out_room - c->out_size) {
        c->need = c->out_size + size;
        return KV_MORE;
    }
    return KV_OK;
}

static int emit_copy(kv_composer *c, uint64_t source, uint64_t n)
{
    if (c->open == OP_COPY && c->open_source + c->open_n == source) {
        c->open_n += n;
    } else {
        const int rc = room(c, 17, 1);
        if (rc != KV_OK)
            return rc;
        c->open = OP_COPY;
        c->open_at = c->out_size;
        c->open_source = source;
        c->open_n = n;
        c->out[c->open_at] = OP_COPY;
        set64(c->out + c->open_at + 1, source);
        c->out_size += 17;
        c->n_ops++;
    }
    set64(c->out + c->open_at + 9, c->open_n);
    c->shared += n;
    return KV_OK;
}

static int emit_literal(kv_composer *c, const uint8_t *from, uint64_t n)
{
    const int begins = c->open != OP_LITERAL;
    const int rc = room(c, n > UINT64_MAX - 9 ? n : n + (begins ? 9 : 0), begins);
    if (rc != KV_OK)
        return rc;
    if (begins) {
        c->open = OP_LITERAL;
        c->open_at = c->out_size;
        c->open_n = 0;
        c->out[c->open_at] = OP_LITERAL;
        c->out_size += 9;
        c->n_ops++;
    }
    memcpy(c->out + c->out_size, from, (size_t)n);
    c->out_size += n;
    c->open_n += n;
    set64(c->out + c->open_at + 1, c->open_n);
    return KV_OK;
}

/* Emits the parent's ops for the rest of a COPY. */
static int emit_pieces(kv_composer *c)
{
    while (c->left) {
        find_piece(c, c->source);
        const kv_piece *p = &c->pieces[c->piece];
        const uint64_t into = c->source - p[0].start, n = least(c->left, p[1].start - c->source);
        const int rc = p->copy ? emit_copy(c, p->at + into, n) : emit_literal(c, c->parent + p->at + into, n);
        if (rc != KV_OK)
            return rc;
        c->source += n;
        c->left -= n;
    }
    return KV_OK;
}

int kv_compose(kv_composer *c)
{
    int rc;
    if (c->stage == 0) {
        if (c->limit < KV_HEADER)
            return KV_REFUSED;
        if ((rc = list_pieces(c)) != KV_OK)
            return rc;
        c->stage = 1;
        c->open = OP_NONE;
        c->out_size = c->child_at = KV_HEADER;
        c->child_ops = get32(c->child + 40);
    }
    for (;;) {
        if ((rc = emit_pieces(c)) != KV_OK)
            return rc;
        if (c->child_ops == 0)
            return c->child_at == c->child_bytes ? KV_OK : KV_SIZE_MISMATCH;
        uint64_t at = c->child_at;
        op o = {0};
        if ((rc = next_op(c->child, c->child_bytes, &at, c->pieces[c->n_pieces].start, &o)) != KV_OK)
            return rc;
        if (!o.copy && o.n && (rc = emit_literal(c, o.from, o.n)) != KV_OK)
            return rc;
        if (o.copy) {
            c->source = o.at;
            c->left = o.n;
        }
        c->child_at = at;
        c->child_ops--;
    }
}
